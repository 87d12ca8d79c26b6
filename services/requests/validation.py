"""Validates a client's request, and turns it into parameters that every worker accepts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import (
    ADAPTER_NOT_LOADED,
    NO_TOKEN_LEFT,
    InvalidArgument,
    NotFound,
    Unavailable,
    quoted,
)
from quire.sampling.constraints import check_vocabulary, contradiction
from quire.sampling.messages import format_from_proto, values_from_proto
from quire.sampling.output_format import MAX_FORMAT_BYTES, OutputFormat
from quire.sampling.parameter import check_values
from quire.sampling.params import (
    MAX_SEQUENCES,
    MIN_BUDGET_BLOCKS,
    ResponseOptions,
    SamplingParams,
    check_best_of,
)
from quire.services.requests.bad_words import bad_words
from quire.services.requests.division import Division, divide
from quire.services.requests.prompts import check_token_ids, read_prompt
from quire.services.requests.received_answers import check_received
from quire.services.requests.served_model import ServedModel
from quire.services.server.parameters import check_at_most, check_from_one, parameters_checked

MAX_STOP_STRING_CHARS = 256
MAX_CACHE_SALT_CHARS = 128
MAX_REQUEST_ID_CHARS = 128

_REQUEST_ID = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request with every default filled in and every limit checked."""

    request_id: str
    """The client's id for the request, or a new one."""
    prompt_field: str
    """Field in which the client sent the prompt: text, token_ids or chat."""
    prompt_token_ids: list[int]
    params: SamplingParams
    """Parameters for workers, which sample ``n`` answers. The seed is chosen here, so that a retry continues
    with the same random numbers."""
    num_best: int | None
    """Number of answers to return, the most probable of those sampled; None: return all as they come."""
    response: ResponseOptions
    format: OutputFormat | None
    cache_salt: str
    priority: int = 0
    adapter: str = ""
    """Digest of the adapter that computes it; empty for none."""
    is_clamped: bool = False
    """Whether the model's length leaves fewer tokens than the client allows an answer to have."""
    received: Sequence[pb.ReceivedAnswer] = ()
    """What the client has received of the answers in an earlier stream; each index at most once."""
    descriptor: bytes = b""
    """Cache descriptor of the workers that may continue what was received; empty without it."""
    bad_words_field: str = "sampling.bad_words"
    """Field in which the client sent the bad words."""
    division: Division | None = None
    """How to divide the answers; None: the client wants only their text."""

    @property
    def token_before_answer(self) -> int | None:
        """The token whose text the answers continue; None for a chat, whose answers begin a text."""
        return None if self.prompt_field == "chat" else self.prompt_token_ids[-1]

    @property
    def num_input_tokens(self) -> int:
        """Number of tokens that workers compute before they generate: of the prompt, and received ones."""
        continued = (answer for answer in self.received if not answer.is_finished)
        return len(self.prompt_token_ids) + sum(len(answer.token_ids) for answer in continued)


async def validate(generation: pb.Generation, model: ServedModel) -> ValidRequest:
    """Tokenize and check a request, and fill in its defaults.

    Raises:
        InvalidArgument: a field is invalid; the error names the field, the limit and the value.
        NotFound: the request names another model.
        Unavailable: the workers have different weights under the adapter's name.
    """
    adapter = find_adapter(generation.model, model)
    request_id = generation.request_id or secrets.token_hex(8)
    check_request_id(request_id)
    check_at_most(MAX_CACHE_SALT_CHARS, len(generation.cache_salt), "cache_salt", "characters")
    output_format = format_from_proto(generation.format)
    with parameters_checked():
        values = {**model.sampling_defaults, **values_from_proto(SamplingParams, generation)}
        check_values(SamplingParams, values)
        response = ResponseOptions(**values_from_proto(ResponseOptions, generation))
    num_answers = values.get("n", 1)
    _check_answers(values, response, num_answers)
    _check_stop_strings(response.stop_strings)
    if output_format is not None:
        _check_format(output_format, f"format.{output_format.kind}", generation)
    _check_for_model(values, generation, model)
    values["bad_words"] = await bad_words(generation.sampling, model.tokenizer, model.vocab_size)
    check_token_ids(generation.stopping.stop_token_ids, model, "stopping.stop_token_ids")
    prompt = await read_prompt(generation, model)
    num_left = model.max_model_len - len(prompt)
    values["max_tokens"] = min(values.get("max_tokens", num_left), num_left)
    division = _division(generation, prompt, model, response.stop_strings)
    if division is not None:
        output_format = division.format
    num_best = num_answers if (response.best_of or 1) > num_answers else None
    values["n"] = response.best_of or num_answers
    values.setdefault("seed", secrets.randbits(64))
    if num_best is not None:
        # The answers are ranked by the logprobs of their tokens.
        values.setdefault("num_logprobs", 0)
    with parameters_checked():
        params = SamplingParams(**values)
        check_vocabulary(params, model.vocab_size)
    _check_contradictions(params, generation, model)
    descriptor = check_received(generation, params, num_best, model, adapter)
    return ValidRequest(
        request_id=request_id,
        prompt_field=generation.WhichOneof("prompt"),
        prompt_token_ids=prompt,
        params=params,
        num_best=num_best,
        response=response,
        format=output_format,
        cache_salt=generation.cache_salt,
        priority=generation.priority,
        adapter=adapter,
        is_clamped=generation.stopping.max_tokens > num_left,
        received=generation.received,
        descriptor=descriptor,
        bad_words_field=_bad_words_field(generation),
        division=division,
    )


def _division(
    generation: pb.Generation, prompt: Sequence[int], model: ServedModel, stop_strings: Sequence[str]
) -> Division | None:
    """Return how the answer is divided; None if it is not, and then no tool call can be required."""
    if not generation.response.parse:
        if generation.chat.HasField("tool_choice"):
            problem = "needs response.parse, which finds the calls in the answer"
            raise InvalidArgument("chat.tool_choice", problem)
        return None
    division = divide(generation, prompt, model, stop_strings)
    if division.format is not None:
        _check_format(division.format, division.format_field, generation)
    return division


def find_adapter(name: str, model: ServedModel) -> str:
    """Return the digest of the adapter of a name; empty for the served model, also by an empty name.

    Raises:
        NotFound: the name is neither the served model's nor that of an adapter.
        Unavailable: the workers have different weights under the name.
    """
    if name in ("", model.name):
        return ""
    digest = model.adapters().get(name)
    if digest is None:
        raise NotFound(
            f"model {quoted(name)} is not served here; {model.name!r} is",
            reason="MODEL_NOT_FOUND",
            metadata={"field": "model", "served": model.name},
        )
    if not digest:
        raise Unavailable(
            f"prefill and decode workers do not have the same weights of the adapter {quoted(name)}: load "
            "them on all workers",
            reason=ADAPTER_NOT_LOADED,
        )
    return digest


def _check_for_model(values: Mapping[str, Any], generation: pb.Generation, model: ServedModel) -> None:
    """Check what depends on the model; the workers check a KV budget also against the model's windows."""
    top_k, budget = generation.sampling.top_k, values.get("kv_budget_tokens")
    if top_k > model.vocab_size:
        raise InvalidArgument("sampling.top_k", f"must be from 0 (off) to {model.vocab_size}; got {top_k}")
    num_allowed, least = len(generation.sampling.allowed_token_ids), MIN_BUDGET_BLOCKS * model.block_size
    check_at_most(model.vocab_size, num_allowed, "sampling.allowed_token_ids")
    if budget is not None and budget < least:
        raise InvalidArgument(
            "sampling.kv_budget_tokens",
            f"must be at least {least}, {MIN_BUDGET_BLOCKS} blocks; got {budget}",
            metadata={"limit": str(least)},
        )


def _check_answers(values: Mapping[str, Any], response: ResponseOptions, num_answers: int) -> None:
    """Check what must not go together with ``best_of`` and with a beam search."""
    if response.best_of is not None:
        with parameters_checked():
            check_best_of(num_answers, response.best_of)
    if "beam" not in values:
        return
    if response.best_of is not None and response.best_of > max(num_answers, 1):
        raise InvalidArgument(
            "sampling.best_of",
            f"must be 1 with sampling.beam, which has its width; got {response.best_of}",
        )
    if response.logprobs is not None:
        raise InvalidArgument("response.logprobs", "must be absent with sampling.beam, which returns scores")
    if response.stop_strings:
        raise InvalidArgument(
            "stopping.stop_strings", "must be absent with sampling.beam, which ranks whole answers"
        )


class Answers(NamedTuple):
    """The number of answers that a request asks for, each of them a sequence, and the field that sets it."""

    number: int
    field: str


ONE_ANSWER = Answers(1, "sampling.n")


def answers_of(params: pb.SamplingParams) -> Answers:
    """Return the number of answers of a request that is not validated yet, limited to ``MAX_SEQUENCES``."""
    number, field = max(
        (params.n, "sampling.n"),
        (params.best_of, "sampling.best_of"),
        (params.beam.width, "sampling.beam.width"),
        key=lambda asked: asked[0],
    )
    return Answers(min(max(number, 1), MAX_SEQUENCES), field)


def _check_contradictions(params: SamplingParams, generation: pb.Generation, model: ServedModel) -> None:
    """Refuse constraints that leave no first token; the workers check those of a format."""
    constraint = contradiction(params, model.eos_token_ids, model.vocab_size)
    if constraint is not None:
        field = _bad_words_field(generation) if constraint == "bad_words" else "stopping.min_tokens"
        raise InvalidArgument(field, "leaves no token that the other constraints allow", reason=NO_TOKEN_LEFT)


def _bad_words_field(generation: pb.Generation) -> str:
    has_ids_only = generation.sampling.bad_word_token_ids and not generation.sampling.bad_words
    return "sampling.bad_word_token_ids" if has_ids_only else "sampling.bad_words"


def _check_stop_strings(stop_strings: Sequence[str]) -> None:
    for at, stop in enumerate(stop_strings):
        check_from_one(MAX_STOP_STRING_CHARS, len(stop), f"stopping.stop_strings[{at}]", "characters")


def _check_format(output_format: OutputFormat, field: str, generation: pb.Generation) -> None:
    """Check the size of a format and what contradicts it; only the workers have the compiler for the rest."""
    check_from_one(MAX_FORMAT_BYTES, len(output_format.text.encode()), field, "bytes")
    if generation.stopping.ignore_eos:
        raise InvalidArgument(
            "stopping.ignore_eos", "cannot go with a format, whose end is an end-of-sequence token"
        )


def check_request_id(chosen: str) -> None:
    """Refuse a request id that could forge a line of the log, or a header.

    Raises:
        InvalidArgument: the id is not valid.
    """
    if not is_request_id(chosen):
        raise InvalidArgument(
            "request_id",
            f"must hold from 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters, no spaces",
            metadata={"limit": str(MAX_REQUEST_ID_CHARS)},
        )


def is_request_id(text: str) -> bool:
    """Return whether a text is a valid request id: 1 to 128 printable ASCII characters without spaces."""
    return len(text) <= MAX_REQUEST_ID_CHARS and bool(_REQUEST_ID.fullmatch(text))
