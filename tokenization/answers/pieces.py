"""The parts of an answer, as a parser returns them."""

from __future__ import annotations

from enum import IntEnum, auto
from typing import NamedTuple


class Kind(IntEnum):
    """What a part of an answer is."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()

    # That of an enum hashes the member's name in Python, at each look-up by kind.
    __hash__ = int.__hash__


class Piece(NamedTuple):
    """The next part of an answer. All pieces, in order, divide the answer's tokens without gaps."""

    kind: Kind
    text: str
    """New text; for a call, the next part of its arguments, which are JSON text. May be empty."""
    num_tokens: int = 0
    """Number of tokens that this piece covers, with those of its delimiters."""
    call_index: int = 0
    """Number of the call in the answer, from 0."""
    name: str = ""
    """Name of the called function; only in the first piece of a call."""
    call_id: str = ""
    """Id that the model itself wrote for the call; only in the first piece of a call, and often empty."""
