"""Writes bodies as JSON, large ones in steps between which other threads can run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic_core
from pydantic import BaseModel

SLICE_MEMBERS = 64
"""Number of members of a list that are written in one step, which blocks all other threads for about 3 ms."""


def to_json(body: BaseModel) -> bytes:
    """Return the JSON of a body, in UTF-8, without the members that were not set."""
    return body.model_dump_json(exclude_unset=True).encode()


def is_large(body: BaseModel) -> bool:
    """Return whether a body takes long to write, since it has the logprobs of many tokens."""
    if getattr(body, "is_large", False):
        return True
    for part in (body, *getattr(body, "choices", ())):
        logprobs = getattr(part, "logprobs", None)
        tokens = getattr(logprobs, "tokens", ())
        if getattr(part, "prompt_logprobs", None) or len(tokens) > SLICE_MEMBERS:
            return True
    return False


def to_json_in_steps(body: BaseModel) -> bytes:
    """Return the same as ``to_json``, written in steps between which other threads can run."""
    return b"".join(_steps(body))


def _steps(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        before = b"{"
        for name in type(value).model_fields:
            if name in value.model_fields_set:
                yield before + pydantic_core.to_json(name) + b":"
                yield from _steps(getattr(value, name))
                before = b","
        yield b"{}" if before == b"{" else b"}"
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for at, member in enumerate(value):
            yield b"," if at else b"["
            yield from _steps(member)
        yield b"]"
    elif isinstance(value, list) and value:
        for at in range(0, len(value), SLICE_MEMBERS):
            yield b"," if at else b"["
            yield pydantic_core.to_json(value[at : at + SLICE_MEMBERS])[1:-1]
        yield b"]"
    else:
        yield pydantic_core.to_json(value)
