"""Turns prompts into token ids: texts, conversations and the ids that clients send."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, quoted, shortened
from quire.services.requests.served_model import ServedModel
from quire.services.server.parameters import check_at_most
from quire.tokenization.chat_template import ChatTemplateError
from quire.tokenization.tokenizer import TooManyTokensError

MAX_PROMPT_BYTES = 8 << 20
MAX_MESSAGES = 4096
MAX_DETOKENIZED = MAX_TOKENIZED = 1 << 20
INLINE_CHAT_BYTES = 4 << 10
"""Chats up to this size are rendered on the event loop (below 1 ms); larger ones in a thread."""
MAX_CHAT_JSON_BYTES = 256 << 10
"""Maximum size of the JSON text of the tools, and of the template's further variables."""
MAX_MESSAGE_JSON_BYTES = 2 << 20
"""Maximum size of the JSON text of a message's further members: its reasoning and its tool calls."""
ROLES = ("system", "user", "assistant", "tool")

T = TypeVar("T", dict[str, Any], list[Any])


async def read_prompt(generation: pb.Generation, model: ServedModel) -> list[int]:
    """Return the token ids of a request's prompt, which leaves room for at least one more token.

    Raises:
        InvalidArgument: the prompt is missing, empty, malformed or too long.
    """
    kind = generation.WhichOneof("prompt")
    given = (generation.chat.rendered if kind == "chat" else generation.token_ids).ids
    if kind == "chat" and given and not generation.received:
        raise InvalidArgument("chat.rendered", "is for received answers")
    if kind == "token_ids" or given:
        if (num_tokens := len(given)) >= model.max_model_len:
            raise _too_long(kind, model, num_tokens)
        prompt = list(given)
        check_token_ids(prompt, model, "token_ids.ids" if kind == "token_ids" else "chat.rendered.ids")
    elif kind == "text":
        check_size(generation.text, kind)
        prompt = await _encode_prompt(generation.text, model, kind, add_special_tokens=True)
    elif kind == "chat":
        text = await _rendered(generation.chat, model, kind)
        prompt = await _encode_prompt(text, model, kind, add_special_tokens=False)
    else:
        raise InvalidArgument("prompt", "must be set: text, token_ids or chat")
    if not prompt:
        raise InvalidArgument(kind, "must hold at least one token", reason="EMPTY_PROMPT")
    return prompt


async def encode_text(
    text: str, model: ServedModel, field: str = "text", *, add_special_tokens: bool = True
) -> list[int]:
    """Return the token ids of a plain text, which may be longer than a prompt.

    Raises:
        InvalidArgument: the text is too long to tokenize.
    """
    check_size(text, field)
    return await _encode(text, model, field, add_special_tokens=add_special_tokens)


async def encode_chat(chat: pb.Chat, model: ServedModel) -> list[int]:
    """Return the token ids of a conversation, which may be longer than a prompt.

    Raises:
        InvalidArgument: the conversation is invalid or too long.
    """
    text = await _rendered(chat, model, "chat")
    return await _encode(text, model, "chat.messages", add_special_tokens=False)


def check_size(text: str, field: str) -> None:
    """Refuse a text of more than ``MAX_PROMPT_BYTES``.

    Raises:
        InvalidArgument: the text is too long.
    """
    check_at_most(MAX_PROMPT_BYTES, len(text.encode()), field, "bytes")


def check_token_ids(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Refuse token ids that are not in the vocabulary.

    Raises:
        InvalidArgument: names the first such id.
    """
    if max(token_ids, default=0) < model.vocab_size:
        return
    for at, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidArgument(f"{field}[{at}]", f"must be below {model.vocab_size}; got {token_id}")


def check_detokenized(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """Refuse more than ``MAX_DETOKENIZED`` token ids, and ids that are not in the vocabulary.

    Raises:
        InvalidArgument: there are too many ids, or one is unknown.
    """
    check_at_most(MAX_DETOKENIZED, len(token_ids), field)
    check_token_ids(token_ids, model, field)


async def _encode(text: str, model: ServedModel, field: str, *, add_special_tokens: bool) -> list[int]:
    encode = model.tokenizer.encode
    try:
        return await encode(text, add_special_tokens=add_special_tokens, max_tokens=MAX_TOKENIZED)
    except TooManyTokensError as error:
        check_at_most(MAX_TOKENIZED, error.num_tokens, field, "tokens")
        raise


async def _encode_prompt(text: str, model: ServedModel, field: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenize a prompt, unless its number of bytes already shows that it is too long."""
    limit, most_bytes = model.max_model_len - 1, model.tokenizer.most_bytes(1)
    if most_bytes is not None and (least := math.ceil(len(text.encode()) / most_bytes)) > limit:
        raise _too_long(field, model, least, "at least ")
    try:
        return await model.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=limit)
    except TooManyTokensError as error:
        raise _too_long(field, model, error.num_tokens) from error


async def _rendered(chat: pb.Chat, model: ServedModel, field: str) -> str:
    """Return the text of a conversation, in which the template has written the special tokens."""
    if chat.ByteSize() <= INLINE_CHAT_BYTES:
        return _render(chat, model, field)
    return await asyncio.to_thread(_render, chat, model, field)


def _render(chat: pb.Chat, model: ServedModel, field: str) -> str:
    if model.chat_template is None:
        raise InvalidArgument(
            field,
            f"model {model.name!r} has no chat template; send text or token_ids",
            reason="NO_CHAT_TEMPLATE",
        )
    if not chat.messages:
        raise InvalidArgument(f"{field}.messages", "must hold at least one message")
    check_at_most(MAX_MESSAGES, len(chat.messages), f"{field}.messages")
    for at, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidArgument(
                f"{field}.messages[{at}].role",
                f"must be one of {', '.join(ROLES)}; got {quoted(message.role)}",
            )
    check_size("".join(message.content for message in chat.messages), f"{field}.messages")
    messages = [
        {
            **read_json(message.more, dict, f"{field}.messages[{at}].more", MAX_MESSAGE_JSON_BYTES),
            "role": message.role,
            "content": message.content,
        }
        for at, message in enumerate(chat.messages)
    ]
    tools = read_json(chat.tools, list, f"{field}.tools")
    arguments = read_json(chat.template_arguments, dict, f"{field}.template_arguments")
    if tools and not model.chat_template.shows_tools:
        raise InvalidArgument(f"{field}.tools", "the model's chat template does not show it any tools")
    try:
        text = model.chat_template.render(messages, tools, arguments)
        # The JSON texts may have half of a surrogate pair, which UTF-8 cannot express.
        return text.encode(errors="replace").decode()
    except ChatTemplateError as error:
        raise InvalidArgument(f"{field}.messages", shortened(str(error))) from error


def read_json(text: str, kind: type[T], field: str, most_bytes: int = MAX_CHAT_JSON_BYTES) -> T:
    """Return the JSON value of a text; an empty text gives an empty object or list.

    Raises:
        InvalidArgument: the text is too long, or no JSON of that kind.
    """
    check_at_most(most_bytes, len(text.encode()), field, "bytes")
    try:
        value = json.loads(text) if text else kind()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"must be JSON: {error}") from error
    if not isinstance(value, kind):
        raise InvalidArgument(field, f"must be a JSON {'object' if kind is dict else 'array'}")
    return value


def _too_long(field: str, model: ServedModel, num_tokens: int, least: str = "") -> InvalidArgument:
    # Agents look for these words, and then shorten the conversation by themselves.
    return InvalidArgument(
        field,
        f"this model's maximum context length is {model.max_model_len} tokens, at least one of them for the "
        f"answer; the prompt has {least}{num_tokens}",
        reason="CONTEXT_LENGTH_EXCEEDED",
        metadata={"limit": str(model.max_model_len - 1), "num_tokens": str(num_tokens)},
    )
