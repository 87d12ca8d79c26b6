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
    num_later_tokens: int
    """Tokens after those of the first message; 0 if messages have whole answers."""

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: the tokens after the first message, divided by their time; None without any."""
        decode_seconds = self.e2e_seconds - self.ttft_seconds
        return self.num_later_tokens / decode_seconds if self.num_later_tokens else None


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
    num_first_tokens = 0
    begin = time.perf_counter()
    with closing(client.stream(prompt, **options)) as deltas:
        for delta in deltas:
            if first is None and delta.token_ids:
                first, num_first_tokens = time.perf_counter(), len(delta.token_ids)
            usage = delta.usage or usage
            if delta.index == 0:
                pieces.append(delta.text)
            show(delta)
    end = time.perf_counter()
    if usage is None:
        from quire.client import ServerError

        raise ServerError("the answer ended without its usage")
    ttft_seconds = (end if first is None else first) - begin
    # Of a search or of the best samples, messages have whole answers.
    is_streamed = not (options.get("beam_width") or options.get("best_of"))
    num_later_tokens = usage.completion_tokens - num_first_tokens if is_streamed else 0
    return TimedAnswer("".join(pieces), usage, ttft_seconds, end - begin, num_later_tokens)


def format_stats(answer: TimedAnswer) -> str:
    """Return one line about an answer: its speed, and the origin of its KV blocks."""
    usage = answer.usage
    speed = answer.tokens_per_second
    decoded = "1 token" if usage.completion_tokens == 1 else f"{usage.completion_tokens} tokens"
    parts = [
        f"TTFT {answer.ttft_seconds * 1000:.0f} ms",
        decoded if speed is None else f"{decoded} at {speed:.1f} tokens/s",
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
