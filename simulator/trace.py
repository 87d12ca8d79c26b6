"""Requests to replay, in the format of the published Mooncake traces.

Each line is a JSON object with ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in
tokens, and ``hash_ids``, one for each block of the input. Equal ids mean equal tokens in this block and in
all blocks before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from operator import index
from pathlib import Path
from typing import NamedTuple

TRACE_BLOCK_TOKENS = 512
"""Tokens of a block in the published traces."""


class TraceError(ValueError):
    """A line of a trace is not a request; the message names the line."""


class TraceRequest(NamedTuple):
    """A request of a trace."""

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Ids of the input's blocks; the last block may be partial."""


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text: {error}") from error


def read_trace(path: Path, block_tokens: int = TRACE_BLOCK_TOKENS) -> list[TraceRequest]:
    """Return the requests of a file in the order of their arrival.

    Args:
        block_tokens: tokens of a block that an id stands for.

    Raises:
        TraceError: a line is not a request.
    """
    requests = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            request = TraceRequest(
                fields["timestamp"] / 1000,
                int(fields["input_length"]),
                int(fields["output_length"]),
                tuple(map(index, fields["hash_ids"])),
            )
            if not math.isfinite(request.arrival_seconds):
                raise ValueError("the time is not finite")
            if not all(0 <= each < 1 << 64 for each in request.block_ids):
                raise ValueError("hash_ids are from 0 to 2**64 - 1")
        except (KeyError, OverflowError, TypeError, ValueError, RecursionError) as error:
            raise TraceError(
                f"{path}:{number}: must have timestamp, input_length, output_length, hash_ids: {error!r}"
            ) from error
        if request.input_tokens < 1 or request.output_tokens < 1:
            raise TraceError(f"{path}:{number}: input_length and output_length must be at least 1")
        num_blocks = math.ceil(request.input_tokens / block_tokens)
        if len(request.block_ids) < num_blocks:
            raise TraceError(
                f"{path}:{number}: hash_ids must have an id for each {block_tokens} tokens of "
                f"input_length, so at least {num_blocks}; got {len(request.block_ids)}"
            )
        requests.append(request)
    if not requests:
        raise TraceError(f"{path}: holds no requests")
    return sorted(requests, key=lambda request: request.arrival_seconds)


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests to a file."""
    lines = (
        json.dumps(
            {
                "timestamp": round(request.arrival_seconds * 1000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.block_ids,
            }
        )
        for request in requests
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def scaled(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """Return the same requests, arriving at ``factor`` times the rate."""
    return [request._replace(arrival_seconds=request.arrival_seconds / factor) for request in requests]


def reusable_share(requests: Sequence[TraceRequest], block_tokens: int) -> float:
    """Return the share of the input tokens that an unlimited cache on one worker would hit."""
    seen: set[int] = set()
    num_reused = 0
    for request in requests:
        num_blocks = 0
        for block_id in request.block_ids:
            if block_id not in seen:
                break
            num_blocks += 1
        num_reused += min(num_blocks * block_tokens, request.input_tokens - 1)
        seen.update(request.block_ids)
    return num_reused / sum(request.input_tokens for request in requests)
