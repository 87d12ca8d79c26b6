"""Defines the fields that completions and chat completions share, and translates them to ``quire.v1``."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from google.protobuf.message import Message
from pydantic import ConfigDict, Field

from quire.fairness.patience import MAX_PRIORITY
from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.sampling.messages import format_to_proto
from quire.sampling.output_format import choice_format
from quire.sampling.params import BeamParams, ResponseOptions
from quire.services.router.http.shared.fields import (
    AnswerFields,
    Body,
    Ignored,
    LogprobCount,
    StopString,
    TokenCount,
    TokenId,
    TokenIdKey,
    limits,
)


class StreamOptions(Body):
    """Options for what a stream contains in addition to the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class JsonSchema(Body):
    """A JSON schema and its name."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="The schema is followed in any case.")


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """A JSON value that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """The form of the answer, with vLLM's names; exactly one member must be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None


class GenerationFields(AnswerFields):
    """The fields that both completions and chat completions take."""

    n: Annotated[int, limits("n")] | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, limits("temperature")] | None = None
    top_p: Annotated[float, limits("top_p")] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | Annotated[list[StopString], limits("stop_strings", ResponseOptions)] | None = None
    presence_penalty: Annotated[float, limits("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, limits("frequency_penalty")] | None = None
    logit_bias: dict[TokenIdKey, Annotated[float, limits("logit_bias")]] | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    # Fields that OpenAI does not have; the names are vLLM's.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31, description="0 and -1 are off.")] | None = None
    min_p: Annotated[float, limits("min_p")] | None = None
    repetition_penalty: Annotated[float, limits("repetition_penalty")] | None = None
    min_tokens: TokenCount | None = None
    stop_token_ids: Annotated[list[TokenId], limits("stop_token_ids")] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: (
        Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Lower is sooner.")] | None
    ) = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = Field(None, description="Return the n best of a search with n beams.")
    length_penalty: Annotated[float, limits("length_penalty", BeamParams)] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: LogprobCount | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Requests with different salts share no KV blocks."
    )
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description="Write tokens as token_id:N.")

    # quire's own.
    typical_p: Annotated[float, limits("typical_p")] | None = None

    user: Ignored = None
    metadata: Annotated[Any, Field(description="session_id names the session, for metrics.")] = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Annotated[Any, Field(description="Names the session, for metrics.")] = None
    prompt_cache_retention: Ignored = None
    spaces_between_special_tokens: Ignored = None

    @property
    def stops(self) -> list[str]:
        """Stop strings as a list, whether the client sent one string or a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with an event that has the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        """Whether every event of a stream has the token counts so far."""
        return self.includes_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


def sampling_params(fields: GenerationFields, best_of: int | None = None) -> pb.SamplingParams:
    """Return the parameters of sampling or of the beam search, for ``quire.v1``.

    Raises:
        InvalidArgument: ``length_penalty`` is set without ``use_beam_search``.
    """
    beam, num_answers = None, fields.n or 1
    if fields.use_beam_search:
        beam = pb.BeamParams(width=num_answers, length_penalty=fields.length_penalty)
    elif fields.length_penalty is not None:
        raise InvalidArgument("length_penalty", "is for use_beam_search")
    values = _same_fields(fields, pb.SamplingParams) | {
        "top_k": max(fields.top_k, 0) if fields.top_k is not None else None,
        "seed": fields.seed % (1 << 64) if fields.seed is not None else None,
        "n": None if beam else num_answers,
        "best_of": best_of,
        "beam": beam,
    }
    return pb.SamplingParams(**values)


def stopping_params(fields: GenerationFields, max_tokens: int | None) -> pb.StoppingParams:
    """Return the parameters that decide when an answer ends, for ``quire.v1``."""
    values = _same_fields(fields, pb.StoppingParams) | {
        "max_tokens": max_tokens,
        "stop_strings": fields.stops,
    }
    return pb.StoppingParams(**values)


def _same_fields(fields: GenerationFields, message: type[Message]) -> dict[str, Any]:
    """Return the values of the fields that have the same name in a message."""
    return {
        name: getattr(fields, name)
        for name in GenerationFields.model_fields
        if name in message.DESCRIPTOR.fields_by_name
    }


def answer_format(fields: GenerationFields) -> pb.ResponseFormat | None:
    """Return the form that answers must have; None if they may have any.

    Raises:
        InvalidArgument: the fields that name the form contradict each other.
    """
    if fields.structured_outputs is not None:
        if fields.response_format is not None:
            raise InvalidArgument("structured_outputs", "cannot go with response_format")
        return _structured(fields.structured_outputs)
    match fields.response_format:
        case JsonObjectFormat():
            return pb.ResponseFormat(json_schema='{"type":"object"}')
        case JsonSchemaFormat(json_schema=JsonSchema(schema_=schema)):
            return pb.ResponseFormat(json_schema=json.dumps(schema or {}))
    return None


def sent_names(fields: GenerationFields) -> dict[str, str]:
    """Return the client's names of fields of ``quire.v1`` that could come from several fields."""
    wanted = fields.structured_outputs
    if wanted is None:
        return {}
    names = {"json_": "json"}
    name = "".join(f"structured_outputs.{names.get(each, each)}" for each in wanted.model_fields_set)
    return dict.fromkeys(("format.json_schema", "format.regex", "format.grammar"), name)


def _structured(wanted: StructuredOutputs) -> pb.ResponseFormat:
    if len(wanted.model_fields_set) != 1:
        raise InvalidArgument(
            "structured_outputs", "must have exactly one of json, json_object, regex, grammar, choice"
        )
    if wanted.json_ is not None:
        schema = wanted.json_ if isinstance(wanted.json_, str) else json.dumps(wanted.json_)
        return pb.ResponseFormat(json_schema=schema)
    if wanted.choice is not None:
        return format_to_proto(choice_format(wanted.choice))
    if wanted.json_object:
        return pb.ResponseFormat(json_schema='{"type":"object"}')
    return pb.ResponseFormat(regex=wanted.regex, grammar=wanted.grammar)
