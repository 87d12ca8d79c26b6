"""Streams one answer and measures it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.cli.sizes import format_size

if TYPE_CHECKING:
    from quire.client import Client, Delta, GenerationOptions, Prompt, Usage


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A finished answer (the first if there are several), and the timings of all answers."""

    text: str
    usage: Usage
    ttft_seconds: float
    e2e_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the tokens of all answers after the first one, divided by their time."""
        decode_seconds = self.e2e_seconds - self.ttft_seconds
        return (self.usage.completion_tokens - 1) / decode_seconds if decode_seconds > 0 else 0.0


def stream_answer(
    client: Client,
    prompt: Prompt,
    options: GenerationOptions,
    show: Callable[[Delta], None],
) -> TimedAnswer:
    """Show the steps of one or several answers as they arrive; an interrupt cancels the request.

    Raises:
        QuireError: the call failed.
    """
    pieces: list[str] = []
    usage: Usage | None = None
    first: float | None = None
    begin = time.perf_counter()
    with closing(client.stream(prompt, **options)) as deltas:
        for delta in deltas:
            first = time.perf_counter() if first is None and delta.token_ids else first
            usage = delta.usage or usage
            if delta.index == 0:
                pieces.append(delta.text)
            show(delta)
    end = time.perf_counter()
    if usage is None:
        from quire.client import ServerError

        raise ServerError("the answer ended without its usage")
    return TimedAnswer("".join(pieces), usage, (end if first is None else first) - begin, end - begin)


def format_stats(answer: TimedAnswer) -> str:
    """Return one line about an answer: its speed, and the origin of its KV blocks."""
    usage = answer.usage
    decoded = f"{usage.completion_tokens} tokens at {answer.tokens_per_second:.1f} tokens/s"
    parts = [
        f"TTFT {answer.ttft_seconds * 1000:.0f} ms",
        "1 token" if usage.completion_tokens == 1 else decoded,
        f"prompt {usage.prompt_tokens} tokens, {usage.cached_prompt_tokens} cached",
        f"{usage.blocks_shipped} blocks ({format_size(usage.bytes_shipped)}) shipped,"
        f" {usage.blocks_reused_on_decode} already there",
    ]
    if usage.accepted_draft_tokens:
        parts.append(f"{usage.accepted_draft_tokens} tokens guessed")
    if usage.blocks_pulled:
        parts.append(f"{usage.blocks_pulled} blocks ({format_size(usage.bytes_pulled)}) pulled")
    if usage.retries:
        parts.append("1 retry" if usage.retries == 1 else f"{usage.retries} retries")
    return " · ".join(parts)
