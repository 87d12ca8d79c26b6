"""Joins the pieces of an answer that is divided into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from quire.protos import inference_pb2 as pb


def joined(pieces: Iterable[pb.Piece]) -> list[pb.Piece]:
    """Return the pieces with those joined that follow each other in the same part."""
    return [_one(list(run)) for _, run in groupby(pieces, _part)]


def _part(piece: pb.Piece) -> tuple[str | None, int]:
    return piece.WhichOneof("piece"), piece.tool_call.index


def _one(run: list[pb.Piece]) -> pb.Piece:
    if len(run) == 1:
        return run[0]
    whole = pb.Piece(num_tokens=sum(piece.num_tokens for piece in run))
    kind, index = _part(run[0])
    if kind == "tool_call":
        calls = [piece.tool_call for piece in run]
        # The mark before a call comes without the call's name.
        head = next((call for call in calls if call.name), calls[0])
        arguments = "".join(call.arguments for call in calls)
        whole.tool_call.MergeFrom(pb.ToolCall(index=index, id=head.id, name=head.name, arguments=arguments))
    else:
        name = kind or "content"
        setattr(whole, name, "".join(getattr(piece, name) for piece in run))
    return whole
