"""From Python values to messages and back; shared by the sync and the async client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from quire.client.errors import ServerError, invalid_request
from quire.client.types import (
    Candidate,
    Completion,
    Delta,
    FinishReason,
    GenerationOptions,
    Message,
    ModelInfo,
    Prompt,
    TokenLogprobs,
    Usage,
)
from quire.protos import inference_pb2 as pb

# Option of a call: the sub-message of Generation that holds it ("" is Generation itself) and its field there.
_FIELDS: Mapping[str, tuple[str, str]] = {
    "temperature": ("sampling", "temperature"),
    "top_p": ("sampling", "top_p"),
    "top_k": ("sampling", "top_k"),
    "min_p": ("sampling", "min_p"),
    "seed": ("sampling", "seed"),
    "max_tokens": ("stopping", "max_tokens"),
    "min_tokens": ("stopping", "min_tokens"),
    "stop": ("stopping", "stop_strings"),
    "stop_token_ids": ("stopping", "stop_token_ids"),
    "ignore_eos": ("stopping", "ignore_eos"),
    "logprobs": ("response", "logprobs"),
    "keep_special_tokens": ("response", "keep_special_tokens"),
    "model": ("", "model"),
    "request_id": ("", "request_id"),
}
_FINISH_REASONS: Mapping[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}


def to_generation(prompt: Prompt, options: GenerationOptions) -> pb.Generation:
    """Return the message of a generation.

    Raises:
        InvalidRequest: a value does not fit its field.
        TypeError: an option is unknown.
    """
    generation = pb.Generation()
    _set_prompt(generation, prompt)
    for name, value in options.items():
        if name not in _FIELDS:
            raise TypeError(f"unknown option {name!r}; known are {', '.join(sorted(_FIELDS))}")
        if value is not None:
            group, field = _FIELDS[name]
            owner = getattr(generation, group) if group else generation
            _set(owner, field, [value] if field == "stop_strings" and isinstance(value, str) else value, name)
    return generation


def to_tokenize_request(prompt: str | Sequence[Message]) -> pb.TokenizeRequest:
    """Return the message that asks for the token ids of text or of a conversation."""
    request = pb.TokenizeRequest()
    _set_prompt(request, prompt)
    return request


def to_detokenize_request(token_ids: Iterable[int]) -> pb.DetokenizeRequest:
    """Return the message that asks for the text of token ids."""
    request = pb.DetokenizeRequest()
    _set(request, "token_ids", token_ids, "token_ids")
    return request


def to_completion(response: pb.GenerateResponse) -> Completion:
    """Return a whole answer."""
    reason = _FINISH_REASONS.get(response.finish_reason)
    if reason is None:
        raise ServerError("the answer came without a finish reason")
    return Completion(
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish_reason=reason,
        usage=_to_usage(response.usage),
        logprobs=_to_logprobs(response.logprobs),
        request_id=response.request_id,
    )


def to_delta(response: pb.GenerateStreamResponse) -> Delta:
    """Return one step of a streamed answer."""
    return Delta(
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=_to_logprobs(response.logprobs),
        finish_reason=_FINISH_REASONS.get(response.finish_reason),
        usage=_to_usage(response.usage) if response.HasField("usage") else None,
        request_id=response.request_id,
    )


def to_model_info(response: pb.GetModelInfoResponse) -> ModelInfo:
    """Return the served model."""
    return ModelInfo(
        model=response.model,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        block_size=response.block_size,
        num_prefill_workers=response.num_prefill_workers,
        num_decode_workers=response.num_decode_workers,
    )


def _set_prompt(owner: pb.Generation | pb.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _set(owner, "text", prompt, "prompt")
    elif len(prompt) and isinstance(prompt[0], Mapping):
        owner.chat.messages.extend(map(_to_chat_message, cast("Sequence[Message]", prompt)))
    elif isinstance(owner, pb.Generation):
        # Chosen even when it is empty, so that the server says what is wrong with an empty prompt.
        owner.token_ids.SetInParent()
        _set(owner.token_ids, "ids", prompt, "prompt")
    else:
        raise invalid_request("prompt", "must be text or a conversation of at least one message")


def _to_chat_message(message: Message) -> pb.ChatMessage:
    if set(message) != {"role", "content"}:
        raise invalid_request("prompt", f"a message has a role and a content, not {', '.join(message)}")
    result = pb.ChatMessage()
    _set(result, "role", message["role"], "prompt")
    _set(result, "content", message["content"], "prompt")
    return result


def _set(owner: Any, field: str, value: Any, name: str) -> None:
    """Set a field, scalar or repeated; ``name`` is what the caller knows it by."""
    try:
        if isinstance(value, Iterable) and not isinstance(value, str):
            getattr(owner, field).extend(value)
        else:
            setattr(owner, field, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise invalid_request(name, f"{value!r:.80} does not fit: {error}") from error


def _to_usage(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        blocks_shipped=usage.blocks_shipped,
        bytes_shipped=usage.bytes_shipped,
        blocks_reused_on_decode=usage.blocks_reused_on_decode,
        retries=usage.retries,
    )


def _to_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(each.logprob, tuple(Candidate(top.token_id, top.logprob) for top in each.top))
        for each in messages
    )
