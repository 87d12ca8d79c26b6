"""From a client's request to parameters that every worker accepts."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from quire.engine.limits import MAX_LOGPROBS, MAX_SEQUENCES, MIN_BUDGET_BLOCKS
from quire.protos import inference_pb2 as pb
from quire.services.errors import InvalidArgument, NotFound
from quire.services.logits_rules import logits_rules
from quire.services.served_model import ServedModel
from quire.tokenization.errors import ChatTemplateError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 1024
MAX_PROMPT_BYTES = 8 << 20
MAX_FORMAT_BYTES = 64 << 10
MAX_CACHE_SALT_CHARS = 128
MAX_REQUEST_ID_CHARS = 128
MAX_MESSAGES = 4096
MAX_DETOKENIZED = 1 << 20
MAX_CHAT_JSON_BYTES = 256 << 10
"""Of the tools, of the template's further variables, and of what a message has besides its text."""
ROLES = ("system", "user", "assistant", "tool")

T = TypeVar("T", dict[str, Any], list[Any])

_REQUEST_ID = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request with every default filled in and every limit checked."""

    request_id: str
    """The client's, or made here: for logs."""
    prompt_token_ids: list[int]
    sampling: pb.SamplingParams
    """As workers take it: ``n`` answers are drawn. The seed is always set, so that a retry goes on with the
    same random numbers."""
    num_best: int | None
    """How many of the answers drawn are returned, the most probable ones; None returns all as they come."""
    stopping: pb.StoppingParams
    """As workers take it: ``max_tokens`` and ``min_tokens`` set, no stop strings."""
    stop_strings: tuple[str, ...]
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    wants_prompt_token_ids: bool
    keep_special_tokens: bool
    keep_stop_string: bool
    format: pb.ResponseFormat


async def validate(generation: pb.Generation, model: ServedModel) -> ValidRequest:
    """Tokenize and check a request.

    Raises:
        InvalidArgument: names the field, the limit and the value.
        NotFound: the model is not served here.
    """
    check_model(generation.model, model)
    request_id = generation.request_id or secrets.token_hex(8)
    check_request_id(request_id)
    sampling = _sampling(generation.sampling, model)
    sampling.MergeFrom(await logits_rules(generation.sampling, model.tokenizer, model.vocab_size))
    _check_logprobs(generation.response, is_search=sampling.HasField("beam"))
    _check_stops(generation.stopping, model)
    _check_format(generation)
    _check_cache_salt(generation.cache_salt)
    prompt = await _prompt(generation, model)
    return ValidRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        num_best=_num_best(generation.sampling),
        stopping=_stopping(generation.stopping, model.max_model_len - len(prompt)),
        stop_strings=tuple(generation.stopping.stop_strings),
        num_logprobs=_optional(generation.response, "logprobs"),
        num_prompt_logprobs=_optional(generation.response, "prompt_logprobs"),
        wants_prompt_token_ids=generation.response.prompt_token_ids,
        keep_special_tokens=generation.response.keep_special_tokens,
        keep_stop_string=generation.response.keep_stop_string,
        format=generation.format,
    )


def check_model(name: str, model: ServedModel) -> None:
    """Refuse a name that is not the served model's; the empty one is."""
    if name not in ("", model.name):
        raise NotFound(
            f"model {name!r} is not served here; {model.name!r} is",
            reason="MODEL_NOT_FOUND",
            metadata={"field": "model", "served": model.name},
        )


async def encode_text(text: str, model: ServedModel, field: str = "text") -> list[int]:
    """Return the token ids of a plain text."""
    check_size(text, field)
    return await model.tokenizer.encode(text)


async def encode_chat(chat: pb.Chat, model: ServedModel, field: str = "chat") -> list[int]:
    """Return the token ids of a conversation; its template writes the special tokens."""
    if model.chat_template is None:
        raise InvalidArgument(
            field,
            f"model {model.name!r} has no chat template; send text or token_ids",
            reason="NO_CHAT_TEMPLATE",
        )
    if not chat.messages:
        raise InvalidArgument(f"{field}.messages", "must hold at least one message")
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidArgument(
            f"{field}.messages",
            f"must be at most {MAX_MESSAGES}; got {len(chat.messages)}",
            metadata={"limit": str(MAX_MESSAGES)},
        )
    for at, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidArgument(
                f"{field}.messages[{at}].role", f"must be one of {', '.join(ROLES)}; got {message.role!r}"
            )
    check_size("".join(message.content for message in chat.messages), f"{field}.messages")
    messages = [
        {
            **_json(message.more, dict, f"{field}.messages[{at}].more"),
            "role": message.role,
            "content": message.content,
        }
        for at, message in enumerate(chat.messages)
    ]
    tools = _json(chat.tools, list, f"{field}.tools")
    arguments = _json(chat.template_arguments, dict, f"{field}.template_arguments")
    if tools and not model.chat_template.shows_tools:
        raise InvalidArgument(f"{field}.tools", "the model's chat template does not show it any tools")
    try:
        text = model.chat_template.render(messages, tools, arguments)
    except ChatTemplateError as error:
        raise InvalidArgument(f"{field}.messages", str(error)) from error
    return await model.tokenizer.encode(text, add_special_tokens=False)


def _json(text: str, kind: type[T], field: str) -> T:
    """Return the JSON value of a text; the empty text is an empty one."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_CHAT_JSON_BYTES:
        raise InvalidArgument(
            field,
            f"must hold at most {MAX_CHAT_JSON_BYTES} bytes; got {num_bytes}",
            metadata={"limit": str(MAX_CHAT_JSON_BYTES)},
        )
    try:
        value = json.loads(text) if text else kind()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"must be JSON: {error}") from error
    if not isinstance(value, kind):
        raise InvalidArgument(field, f"must be a JSON {'object' if kind is dict else 'array'}")
    return value


def check_token_ids(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Refuse ids that are not in the vocabulary."""
    if max(token_ids, default=0) < model.vocab_size:
        return
    for at, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidArgument(f"{field}[{at}]", f"must be below {model.vocab_size}; got {token_id}")


def check_detokenized(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Refuse more ids than one would turn into text, and those that are not in the vocabulary."""
    if len(token_ids) > MAX_DETOKENIZED:
        raise InvalidArgument(
            field,
            f"must be at most {MAX_DETOKENIZED}; got {len(token_ids)}",
            metadata={"limit": str(MAX_DETOKENIZED)},
        )
    check_token_ids(token_ids, model, field)


async def _prompt(generation: pb.Generation, model: ServedModel) -> list[int]:
    kind = generation.WhichOneof("prompt")
    if kind == "text":
        prompt = await encode_text(generation.text, model)
    elif kind == "chat":
        prompt = await encode_chat(generation.chat, model)
    elif kind == "token_ids":
        _check_length(len(generation.token_ids.ids), kind, model)
        prompt = list(generation.token_ids.ids)
        check_token_ids(prompt, model, "token_ids.ids")
    else:
        raise InvalidArgument("prompt", "must be set: text, token_ids or chat")
    if not prompt:
        raise InvalidArgument(kind, "must hold at least one token", reason="EMPTY_PROMPT")
    _check_length(len(prompt), kind, model)
    return prompt


def _check_length(num_tokens: int, field: str, model: ServedModel) -> None:
    if num_tokens > model.max_model_len - 1:
        raise InvalidArgument(
            field,
            f"must hold at most {model.max_model_len - 1} tokens, one less than the model's length; "
            f"got {num_tokens}",
            reason="CONTEXT_LENGTH_EXCEEDED",
            metadata={"limit": str(model.max_model_len - 1)},
        )


def _sampling(params: pb.SamplingParams, model: ServedModel) -> pb.SamplingParams:
    temperature = params.temperature if params.HasField("temperature") else 1.0
    top_p = params.top_p if params.HasField("top_p") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument("sampling.temperature", f"must be finite and at least 0; got {temperature:g}")
    if not 0 < top_p <= 1:
        raise InvalidArgument("sampling.top_p", f"must be above 0 and at most 1; got {top_p:g}")
    if not 0 <= params.min_p <= 1:
        raise InvalidArgument("sampling.min_p", f"must be from 0 to 1; got {params.min_p:g}")
    if params.top_k > model.vocab_size:
        raise InvalidArgument(
            "sampling.top_k", f"must be from 0 (off) to {model.vocab_size}; got {params.top_k}"
        )
    seed = params.seed if params.HasField("seed") else secrets.randbits(64)
    _check_answers(params)
    _check_budget(params, model.block_size)
    return pb.SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=seed,
        n=max(params.n, params.best_of) if max(params.n, params.best_of) > 1 else None,
        beam=params.beam if params.HasField("beam") else None,
        kv_budget_tokens=params.kv_budget_tokens if params.HasField("kv_budget_tokens") else None,
    )


def _check_answers(params: pb.SamplingParams) -> None:
    if params.HasField("n") and not 1 <= params.n <= MAX_SEQUENCES:
        raise InvalidArgument(
            "sampling.n",
            f"must be from 1 to {MAX_SEQUENCES}; got {params.n}",
            metadata={"limit": str(MAX_SEQUENCES)},
        )
    if params.HasField("best_of") and not max(params.n, 1) <= params.best_of <= MAX_SEQUENCES:
        raise InvalidArgument(
            "sampling.best_of",
            f"must be from n = {max(params.n, 1)} to {MAX_SEQUENCES}; got {params.best_of}",
            metadata={"limit": str(MAX_SEQUENCES)},
        )
    if not params.HasField("beam"):
        return
    beam = params.beam
    if params.n > 1:
        raise InvalidArgument(
            "sampling.n", f"must be 1 with sampling.beam, which has its width; got {params.n}"
        )
    if params.best_of > 1:
        raise InvalidArgument(
            "sampling.best_of",
            f"must be 1 with sampling.beam, which has its width; got {params.best_of}",
        )
    if not 2 <= beam.width <= MAX_SEQUENCES:
        raise InvalidArgument(
            "sampling.beam.width",
            f"must be from 2 to {MAX_SEQUENCES}; got {beam.width}",
            metadata={"limit": str(MAX_SEQUENCES)},
        )
    if not math.isfinite(beam.length_penalty):
        raise InvalidArgument("sampling.beam.length_penalty", f"must be finite; got {beam.length_penalty:g}")
    if beam.early_stopping not in pb.EarlyStopping.values():
        raise InvalidArgument(
            "sampling.beam.early_stopping",
            f"must be one of {', '.join(pb.EarlyStopping.keys())}; got {beam.early_stopping}",
        )


def _check_budget(params: pb.SamplingParams, block_size: int) -> None:
    """Check what can be checked without the model, whose windows the workers know."""
    if not params.HasField("kv_budget_tokens"):
        return
    field, least = "sampling.kv_budget_tokens", MIN_BUDGET_BLOCKS * block_size
    if params.kv_budget_tokens < least:
        raise InvalidArgument(
            field,
            f"must be at least {least}, {MIN_BUDGET_BLOCKS} blocks; got {params.kv_budget_tokens}",
            metadata={"limit": str(least)},
        )
    if params.HasField("beam"):
        raise InvalidArgument(field, "must be absent with sampling.beam, which is exact")


def _num_best(params: pb.SamplingParams) -> int | None:
    num_answers = max(params.n, 1)
    return num_answers if params.best_of > num_answers else None


def _stopping(params: pb.StoppingParams, num_left: int) -> pb.StoppingParams:
    max_tokens = params.max_tokens if params.HasField("max_tokens") else num_left
    if not 1 <= max_tokens <= num_left:
        raise InvalidArgument(
            "stopping.max_tokens",
            f"must be from 1 to {num_left}, the model's length less the prompt's; got {max_tokens}",
            reason="CONTEXT_LENGTH_EXCEEDED" if max_tokens > num_left else None,
            metadata={"limit": str(num_left)},
        )
    if not 0 <= params.min_tokens <= max_tokens:
        raise InvalidArgument(
            "stopping.min_tokens", f"must be from 0 to max_tokens = {max_tokens}; got {params.min_tokens}"
        )
    return pb.StoppingParams(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )


def _check_stops(params: pb.StoppingParams, model: ServedModel) -> None:
    if len(params.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidArgument(
            "stopping.stop_strings",
            f"must be at most {MAX_STOP_STRINGS}; got {len(params.stop_strings)}",
            metadata={"limit": str(MAX_STOP_STRINGS)},
        )
    for at, stop in enumerate(params.stop_strings):
        if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
            raise InvalidArgument(
                f"stopping.stop_strings[{at}]",
                f"must hold from 1 to {MAX_STOP_STRING_CHARS} characters; got {len(stop)}",
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            "stopping.stop_token_ids",
            f"must be at most {MAX_STOP_TOKEN_IDS}; got {len(params.stop_token_ids)}",
            metadata={"limit": str(MAX_STOP_TOKEN_IDS)},
        )
    check_token_ids(params.stop_token_ids, model, "stopping.stop_token_ids")


def _check_format(generation: pb.Generation) -> None:
    """Check what can be checked without the compiler, which the workers have."""
    kind = generation.format.WhichOneof("format")
    if kind is None:
        return
    num_bytes = len(getattr(generation.format, kind).encode())
    if not 1 <= num_bytes <= MAX_FORMAT_BYTES:
        raise InvalidArgument(
            f"format.{kind}",
            f"must hold from 1 to {MAX_FORMAT_BYTES} bytes; got {num_bytes}",
            metadata={"limit": str(MAX_FORMAT_BYTES)},
        )
    if generation.stopping.ignore_eos:
        raise InvalidArgument(
            "stopping.ignore_eos", "cannot go with a format, whose end is an end-of-sequence token"
        )


def _check_cache_salt(salt: str) -> None:
    if len(salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidArgument(
            "cache_salt",
            f"must hold at most {MAX_CACHE_SALT_CHARS} characters; got {len(salt)}",
            metadata={"limit": str(MAX_CACHE_SALT_CHARS)},
        )


def _check_logprobs(options: pb.ResponseOptions, *, is_search: bool) -> None:
    if is_search and options.HasField("logprobs"):
        raise InvalidArgument("response.logprobs", "must be absent with sampling.beam, which returns scores")
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(options, name)
        if number > MAX_LOGPROBS:
            raise InvalidArgument(
                f"response.{name}",
                f"must be at most {MAX_LOGPROBS}; got {number}",
                metadata={"limit": str(MAX_LOGPROBS)},
            )


def _optional(options: pb.ResponseOptions, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    return getattr(options, name) if options.HasField(name) else None


def check_size(text: str, field: str) -> None:
    """Refuse a text that is too long to tokenize."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_PROMPT_BYTES:
        raise InvalidArgument(
            field,
            f"must hold at most {MAX_PROMPT_BYTES} bytes; got {num_bytes}",
            metadata={"limit": str(MAX_PROMPT_BYTES)},
        )


def check_request_id(chosen: str) -> None:
    """Refuse an id that could forge a line of a log, or a header."""
    if not is_request_id(chosen):
        raise InvalidArgument(
            "request_id",
            f"must hold from 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters, no spaces",
            metadata={"limit": str(MAX_REQUEST_ID_CHARS)},
        )


def is_request_id(text: str) -> bool:
    """Return whether a text can be a request's id."""
    return len(text) <= MAX_REQUEST_ID_CHARS and bool(_REQUEST_ID.fullmatch(text))
