"""Translates the requests of ``vllm.grpc.engine`` to those of ``quire.v1``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.sampling.messages import format_to_proto
from quire.sampling.output_format import choice_format

_NAMES_OF_QUIRE = {
    field.name
    for message in (pb.SamplingParams, pb.StoppingParams, pb.ResponseOptions)
    for field in message.DESCRIPTOR.fields
}
_NAMES_OF_VLLM = {"stop", "skip_special_tokens"}
_CONSTRAINT_KINDS = {"json_schema", "regex", "grammar", "json_object", "choice", "structural_tag"}
_UP_TO_THE_GATEWAY = {"include_stop_str_in_output", "spaces_between_special_tokens"}
"""Fields without effect here: the gateway turns the tokens into text."""
_ALWAYS_SO = {"grammar_from_first_token"}
_SERVED = _NAMES_OF_QUIRE | _NAMES_OF_VLLM | _CONSTRAINT_KINDS | _UP_TO_THE_GATEWAY | _ALWAYS_SO
_MAX_INT32 = (1 << 31) - 1
"""Largest number of tokens in ``quire.v1``; vLLM's numbers have one bit more."""
_CONSTRAINTS = "json_schema, regex, grammar, json_object, choice"


def generation_from_proto(request: Any) -> pb.Generation:
    """Return the generation that a ``GenerateRequest`` asks for.

    A value of 0 in a scalar field without presence means that the field is absent.

    Raises:
        InvalidArgument: the request uses a feature that is not served here.
    """
    _refuse_what_is_not_served(request)
    params = request.sampling_params
    stopping = _same_fields(params, pb.StoppingParams)
    if "max_tokens" in stopping:
        stopping["max_tokens"] = min(stopping["max_tokens"], _MAX_INT32)
    return pb.Generation(
        request_id=request.request_id,
        token_ids=pb.TokenIds(ids=request.tokenized.input_ids),
        sampling=_sampling(params),
        stopping=pb.StoppingParams(**stopping, stop_strings=params.stop),
        response=pb.ResponseOptions(
            logprobs=_num_logprobs(params, "logprobs"),
            prompt_logprobs=_num_logprobs(params, "prompt_logprobs"),
            keep_special_tokens=not params.skip_special_tokens,
        ),
        format=_format(params),
    )


@contextmanager
def fields_as_sent() -> Iterator[None]:
    """Rename the fields of ``quire.v1`` in errors to their names in ``vllm.grpc.engine``."""
    try:
        yield
    except InvalidArgument as error:
        field = _field(error.field)
        raise InvalidArgument(
            field, error.problem, reason=error.reason, metadata={**error.metadata, "field": field}
        ) from error


def _field(field: str) -> str:
    name, bracket, index = field.partition("[")
    if name in ("token_ids", "token_ids.ids"):
        return f"tokenized.input_ids{bracket}{index}"
    group, dot, rest = field.partition(".")
    if not dot or group not in ("sampling", "stopping", "response", "format"):
        return field
    return f"sampling_params.{'stop' + bracket + index if name == 'stopping.stop_strings' else rest}"


def _refuse_what_is_not_served(request: Any) -> None:
    if request.WhichOneof("input") != "tokenized":
        raise InvalidArgument("input", "must be tokenized: this service takes only token ids")
    if request.HasField("kv_transfer_params"):
        raise InvalidArgument("kv_transfer_params", "must be absent: send kv_transfer_params_json")
    for field in ("mm_inputs", "media_refs"):
        if request.HasField(field):
            raise InvalidArgument(field, "must be absent: the model reads only text")
    if request.extra_mm_inputs:
        raise InvalidArgument("extra_mm_inputs", "must be empty: the model reads only text")
    if request.data_parallel_rank > 0:
        raise InvalidArgument("data_parallel_rank", "must be 0: a worker is one engine")
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        raise InvalidArgument(
            "sampling_params.truncate_prompt_tokens", "must be absent: truncate before you send"
        )
    for field, value in request.sampling_params.ListFields():
        if field.name not in _SERVED:
            raise InvalidArgument(f"sampling_params.{field.name}", "is not served")
        if field.name == "min_tokens" and value > _MAX_INT32:
            raise InvalidArgument("sampling_params.min_tokens", f"must be at most {_MAX_INT32}; got {value}")


def _sampling(params: Any) -> pb.SamplingParams:
    if bad := [token_id for token_id in params.logit_bias if token_id < 0]:
        raise InvalidArgument("sampling_params.logit_bias", f"there is no token {bad[0]}")
    values = _same_fields(params, pb.SamplingParams)
    if "seed" in values:
        # vLLM's seed is signed and quire's is not; equal seeds must still give equal tokens.
        values["seed"] %= 1 << 64
    return pb.SamplingParams(**values)


def _same_fields(params: Any, message: type[Message]) -> dict[str, Any]:
    """Return the values of the fields that are set and have the same name in a message."""
    return {
        field.name: value
        for field, value in params.ListFields()
        if field.name in message.DESCRIPTOR.fields_by_name
    }


def _num_logprobs(params: Any, field: str) -> int | None:
    if not params.HasField(field):
        return None
    number: int = getattr(params, field)
    if number < 0:
        raise InvalidArgument(f"sampling_params.{field}", f"must be at least 0; got {number}, all of them")
    return number


def _format(params: Any) -> pb.ResponseFormat | None:
    match params.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema" | "regex" | "grammar" as kind:
            return pb.ResponseFormat(**{kind: getattr(params, kind)})
        case "json_object":
            return pb.ResponseFormat(json_schema='{"type":"object"}') if params.json_object else None
        case "choice":
            return format_to_proto(choice_format(params.choice.choices))
        case kind:
            raise InvalidArgument(f"sampling_params.{kind}", f"is not served; {_CONSTRAINTS} are")
