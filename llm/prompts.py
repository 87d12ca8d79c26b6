"""Checks prompts and conversations before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def check_prompt(prompt: Any, name: str) -> None:
    """Refuse what is neither a text nor token ids.

    Args:
        name: what messages call the prompt.

    Raises:
        ValueError: it is neither, or the text is no Unicode.
    """
    if isinstance(prompt, str):
        _check_text(prompt, name)
    elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise ValueError(f"{name} must be a text or a list of token ids; got {type(prompt).__name__}")


def with_texts(conversation: Any, at: int) -> list[dict[str, Any]]:
    """Return a conversation whose contents are texts: parts of one content are joined.

    Args:
        at: the place of the conversation among several.

    Raises:
        ValueError: the conversation is empty, or a content is something else.
    """
    name = f"messages[{at}]"
    if not conversation or isinstance(conversation, str) or not isinstance(conversation, Sequence):
        raise ValueError(f"{name} must be a list of messages; got {conversation!r:.100}")
    return [_with_text(message, f"{name}[{number}]") for number, message in enumerate(conversation)]


def _with_text(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{name} must be a message with role and content; got {message!r:.100}")
    content = message.get("content")
    if isinstance(content, list) and all(map(_is_text_part, content)):
        content = "".join(part["text"] for part in content)
    if content is None and message.get("tool_calls"):
        return dict(message)
    if not isinstance(content, str):
        raise ValueError(f"{name}.content must be a text; got {content!r:.100}")
    _check_text(content, f"{name}.content")
    return {**message, "content": content}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is no Unicode text: {error}") from error
