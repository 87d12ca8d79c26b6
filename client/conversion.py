"""Converts Python values to protobuf messages and back, for the sync and the async client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from quire.client import types
from quire.client.channel import MAX_MESSAGE_BYTES
from quire.client.errors import QuireError, ServerError, from_status, invalid_request
from quire.protos import inference_pb2 as pb
from quire.sampling.messages import EARLY_STOPPING

T = TypeVar("T")
_MESSAGES: Mapping[str, type[ProtoMessage]] = {
    "": pb.Generation,
    "sampling": pb.SamplingParams,
    "sampling.beam": pb.BeamParams,
    "stopping": pb.StoppingParams,
    "format": pb.ResponseFormat,
    "response": pb.ResponseOptions,
    "chat": pb.Chat,
    "chat.tool_choice": pb.ToolChoice,
}
"""Messages in a generation, by their paths, that have the options of a call as fields."""
_OTHER_NAMES = {
    "width": "beam_width",
    "stop_strings": "stop",
    "mode": "tool_choice",
    "names": "allowed_tools",
    "is_single": "single_call",
}
"""Options whose names are not those of their fields."""


def _fields() -> dict[str, tuple[str, str]]:
    """Return, for each option of a call, the path of its message and its field."""
    found = {
        _OTHER_NAMES.get(field.name, field.name): (path, field.name)
        for path, message in _MESSAGES.items()
        for field in message.DESCRIPTOR.fields
    }
    return {option: found[option] for option in types.GenerationOptions.__annotations__}


_FIELDS = _fields()
_LARGE_FIELDS: Mapping[type[ProtoMessage], str] = {
    pb.GenerateBatchRequest: "prompts",
    pb.EmbedRequest: "texts",
    pb.DetokenizeRequest: "token_ids",
}
"""What a client calls the largest part of a request, where it is not the prompt."""
_TOO_DEEP = "is nested too deeply"
_BYTES = bytes | bytearray | memoryview
_FORMATS = ("json_schema", "regex", "grammar")
_FINISH_REASONS: Mapping[int, types.FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_TOOL_MODES = {"auto": pb.TOOL_MODE_UNSPECIFIED, "required": pb.TOOL_MODE_REQUIRED}
_JSON_FIELDS = ("json_schema", "tools", "template_arguments")


def to_generation(prompt: types.Prompt, options: types.GenerationOptions) -> pb.Generation:
    """Return the message that describes a generation.

    Raises:
        InvalidRequest: a value does not fit its field.
        TypeError: an option is unknown.
    """
    generation = pb.Generation()
    _set_prompt(generation, prompt)
    formats = [name for name in _FORMATS if options.get(name) is not None]
    if len(formats) > 1:
        raise invalid_request(formats[1], f"cannot go with {formats[0]}: an answer has one format")
    for name, value in options.items():
        if name not in _FIELDS:
            raise TypeError(f"unknown option {name!r}; known are {', '.join(sorted(_FIELDS))}")
        if value is not None:
            group, field = _FIELDS[name]
            if group.startswith("chat") and not generation.HasField("chat"):
                raise invalid_request(name, "is for a conversation")
            owner = attrgetter(group)(generation) if group else generation
            _set(owner, field, [value] if field == "stop_strings" and isinstance(value, str) else value, name)
    return generation


def to_batch(prompts: Sequence[types.Prompt], options: types.GenerationOptions) -> list[pb.Generation]:
    """Return the message that describes the generation of each prompt; errors as of ``to_generation``."""
    return [to_generation(prompt, options) for prompt in checked_list(prompts, "prompts")]


def checked_list(values: Iterable[T], name: str) -> Iterable[T]:
    """Return the values unless they are a single one, whose characters, bytes or keys would be the elements.

    Args:
        name: the argument's name in error messages.

    Raises:
        InvalidRequest: it is no list.
    """
    if isinstance(values, str | _BYTES | Mapping) or not isinstance(values, Iterable):
        raise invalid_request(name, f"must be a list, not {type(values).__name__}")
    return values


def check_size(request: ProtoMessage) -> None:
    """Check that gRPC can send a request.

    Raises:
        InvalidRequest: it is too large.
    """
    if (num_bytes := request.ByteSize()) > MAX_MESSAGE_BYTES:
        problem = f"a request has at most {MAX_MESSAGE_BYTES} bytes, and this one has {num_bytes}"
        raise invalid_request(
            _LARGE_FIELDS.get(type(request), "prompt"), problem, limit=f"{MAX_MESSAGE_BYTES}"
        )


def to_outcome(response: pb.GenerateBatchResponse) -> types.Completion | QuireError:
    """Return the answer to one prompt of a batch, or its error."""
    if response.HasField("response"):
        return to_completion(response.response)
    error = response.error
    return from_status(
        error.code,
        error.message,
        reason=error.reason,
        metadata=error.metadata,
        retry_after=error.retry_after_seconds if error.HasField("retry_after_seconds") else None,
    )


def to_tokenize_request(prompt: str | Sequence[types.Message]) -> pb.TokenizeRequest:
    """Return the message that asks for the token ids of a text or of a conversation."""
    request = pb.TokenizeRequest()
    _set_prompt(request, prompt)
    return request


def to_detokenize_request(token_ids: Iterable[int]) -> pb.DetokenizeRequest:
    """Return the message that asks for the text of token ids."""
    request = pb.DetokenizeRequest()
    _set(request, "token_ids", token_ids, "token_ids")
    return request


def to_completion(response: pb.GenerateResponse) -> types.Completion:
    """Return the completion in a response.

    Raises:
        ServerError: the response is incomplete.
    """
    if not response.choices:
        raise ServerError("the response has no answer")
    return types.Completion(
        choices=tuple(map(_to_choice, response.choices)),
        usage=_to_usage(response.usage),
        request_id=response.request_id,
        prompt_logprobs=_to_logprobs(response.prompt_logprobs),
        max_tokens=response.max_tokens if response.HasField("max_tokens") else None,
    )


def _to_choice(choice: pb.Choice) -> types.Choice:
    reason = _FINISH_REASONS.get(choice.finish_reason)
    if reason is None:
        raise ServerError("the answer has no finish reason")
    return types.Choice(
        index=choice.index,
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=reason,
        logprobs=_to_logprobs(choice.logprobs),
        score=choice.score if choice.HasField("score") else None,
        pieces=tuple(map(_to_piece, choice.pieces)),
        stop_string=choice.stop_string or None,
    )


def _to_piece(piece: pb.Piece) -> types.Piece:
    match piece.WhichOneof("piece"):
        case "tool_call":
            call = piece.tool_call
            return types.ToolCall(call.id, call.name, call.arguments, call.index, piece.num_tokens)
        case "reasoning":
            return types.Reasoning(piece.reasoning, piece.num_tokens)
        case _:
            return types.Content(piece.content, piece.num_tokens)


def to_delta(response: pb.GenerateStreamResponse) -> types.Delta:
    """Return one step of a streamed answer."""
    return types.Delta(
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=_to_logprobs(response.logprobs),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        usage=_to_usage(response.usage) if response.HasField("usage") else None,
        request_id=response.request_id,
        prompt_logprobs=_to_logprobs(response.prompt_logprobs),
        index=response.index,
        score=response.score if response.HasField("score") else None,
        max_tokens=response.max_tokens if response.HasField("max_tokens") else None,
        pieces=tuple(map(_to_piece, response.pieces)),
        stop_string=response.stop_string or None,
    )


def to_embed_request(texts: Sequence[str | Sequence[int]], **options: int | str | None) -> pb.EmbedRequest:
    """Return the message that asks for the embeddings of texts, or of token ids.

    Raises:
        InvalidRequest: a value does not fit its field.
    """
    request = pb.EmbedRequest()
    for index, text in enumerate(checked_list(texts, "texts")):
        _set_prompt(request.inputs.add(), text, f"texts[{index}]")
    for name, value in options.items():
        if value is not None:
            _set(request, name, value, name)
    return request


def to_embeddings(response: pb.EmbedResponse) -> types.Embeddings:
    """Return the embeddings in a response."""
    vectors = tuple(tuple(each.values) for each in response.embeddings)
    return types.Embeddings(vectors, _to_usage(response.usage), response.request_id)


def to_model_info(response: pb.GetModelInfoResponse) -> types.ModelInfo:
    """Return the description of the served model."""
    info = types.ModelInfo(**values_of(types.ModelInfo, response))
    ids, names = tuple(info.eos_token_ids), tuple(info.adapters)
    return replace(info, eos_token_ids=ids, adapters=names, sampling_defaults=dict(info.sampling_defaults))


def _set_prompt(
    owner: pb.Generation | pb.TokenizeRequest | pb.EmbedInput, prompt: types.Prompt, name: str = "prompt"
) -> None:
    """Set a prompt; ``name`` is its name in error messages."""
    if isinstance(prompt, str):
        _set(owner, "text", prompt, name)
    elif isinstance(prompt, Mapping) or not hasattr(prompt, "__getitem__"):
        raise invalid_request(name, f"must be text, token ids or messages, not {type(prompt).__name__}")
    elif len(prompt) and isinstance(prompt[0], Mapping) and not isinstance(owner, pb.EmbedInput):
        for index, message in enumerate(prompt):
            owner.chat.messages.append(_to_chat_message(message, f"{name}[{index}]"))
    elif not isinstance(owner, pb.TokenizeRequest):
        # Set the field even if the prompt is empty, so that the server reports the empty prompt.
        owner.token_ids.SetInParent()
        _set(owner.token_ids, "ids", prompt, name)
    else:
        raise invalid_request(name, "must be text or a conversation of at least one message")


def _to_chat_message(message: Any, name: str) -> pb.ChatMessage:
    """Return a message for the server; ``name`` is its name in error messages."""
    if not isinstance(message, Mapping):
        raise invalid_request(name, f"must be a message, not {type(message).__name__}")
    more: dict[str, Any] = dict(message)
    result = pb.ChatMessage()
    for part in ("role", "content"):
        if part not in more:
            given = ", ".join(map(str, message))
            raise invalid_request(name, f"a message has a role and a content, not {given}")
        _set(result, part, more.pop(part), f"{name}.{part}")
    if unknown := more.keys() - types.Message.__annotations__:
        raise invalid_request(name, f"a message has no {', '.join(sorted(map(str, unknown)))}")
    if "tool_calls" in more:
        calls = checked_list(more["tool_calls"], f"{name}.tool_calls")
        more["tool_calls"] = [
            _template_call(call, f"{name}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    if more:
        result.more = _json(more, json.dumps, name)
    return result


def _template_call(call: Any, name: str) -> dict[str, Any]:
    """Return a call in the form for chat templates, with the arguments as an object."""
    if not isinstance(call, types.ToolCall):
        raise invalid_request(name, f"must be a ToolCall, not {type(call).__name__}")
    arguments = _json(call.arguments, json.loads, f"{name}.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _json(value: Any, convert: Callable[[Any], T], name: str) -> T:
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise invalid_request(name, f"{value!r:.80} is no JSON: {error}") from error
    except RecursionError as error:
        raise invalid_request(name, _TOO_DEEP) from error


def _set(owner: Any, field: str, value: Any, name: str) -> None:
    """Set a scalar or repeated field; ``name`` is the option's name in error messages."""
    try:
        if isinstance(value, _BYTES):
            raise TypeError("bytes are neither text nor numbers")
        if field in _JSON_FIELDS and not isinstance(value, str):
            setattr(owner, field, _json(value, json.dumps, name))
        elif isinstance(value, Mapping):
            getattr(owner, field).update(value)
        elif field == "early_stopping":
            owner.early_stopping = EARLY_STOPPING[value]
        elif field == "mode":
            owner.mode = _TOOL_MODES[value]
        elif field == "bad_word_token_ids":
            owner.bad_word_token_ids.extend(pb.TokenIds(ids=token_ids) for token_ids in value)
        elif isinstance(value, Iterable) and not isinstance(value, str):
            getattr(owner, field).extend(value)
        else:
            setattr(owner, field, value)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise invalid_request(name, f"{value!r:.80} does not fit: {error}") from error


def _to_usage(usage: pb.Usage) -> types.Usage:
    return types.Usage(**{**values_of(types.Usage, usage), "workers": tuple(usage.workers)})


def values_of(kind: Any, message: ProtoMessage) -> dict[str, Any]:
    """Return the fields of a message that a dataclass has under the same names; it must have no others."""
    return {each.name: getattr(message, each.name) for each in fields(kind)}


def _to_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[types.TokenLogprobs, ...]:
    return tuple(
        types.TokenLogprobs(
            each.logprob, tuple(types.Candidate(top.token_id, top.logprob) for top in each.top)
        )
        for each in messages
    )
