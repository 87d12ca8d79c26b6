"""Measures a live cluster, through its public API, for a calibration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from random import Random
from statistics import linear_regression, mean, median
from typing import NamedTuple

from quire.client import AsyncClient, ModelInfo
from quire.simulator.calibration import DECODE_PROMPT_TOKENS, Calibration, CalibrationError, Point

PROMPT_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of sequences per decode worker at which step times are measured."""
REPEATS = 5
PAUSE_SECONDS = 0.1
"""Time before a single prompt."""
DECODE_TOKENS = 48
SHARE_BATCH = 8
"""Sequences per decode worker beside which a prompt is measured."""
REQUESTS_AT_ONCE = 8
"""Short prompts that are sent at once."""
RESERVED_TOKENS = 64
"""Tokens of the model's length that are reserved for an answer."""

OnStep = Callable[[str], None]


class PullSpeed(NamedTuple):
    """The time that copying blocks from one worker to another takes."""

    bytes_per_second: float
    round_trip_seconds: float


class _Timed(NamedTuple):
    """A request's times, in seconds since it was sent."""

    arrivals: tuple[float, ...]
    block_bytes: float


async def calibrate(
    connect: Callable[[], AsyncClient],
    *,
    num_blocks: int,
    max_num_seqs: int,
    pull_speed: PullSpeed | None = None,
    on_step: OnStep = lambda step: None,
) -> Calibration:
    """Measure an idle cluster and return its costs.

    Args:
        connect: opens a client of the cluster.
        num_blocks: blocks of a worker's pool, which the public API does not report.
        max_num_seqs: most sequences that a worker decodes together.
        pull_speed: speed of pulls, measured by other means; None if unknown.

    Raises:
        QuireError: the cluster does not answer.
        CalibrationError: the measurements cannot be used.
    """
    async with connect() as client:
        model = await client.model_info()
        rng = Random(time.time_ns())  # so that each run sends prompts that were not sent before
        probe = _Probe(client, model, rng)
        await probe.send(PROMPT_TOKENS[0], 2)
        first_tokens = await probe.first_tokens(model.max_model_len, on_step)
        steps: list[Point] = []
        for batch in (n for n in BATCHES if n <= max_num_seqs):
            on_step(f"{batch} sequences a decode worker")
            steps.append((batch, await probe.step_seconds(batch * model.num_decode_workers)))
        on_step("sequences with a long prompt")
        longest = PROMPT_TOKENS[len(first_tokens) - 1]
        context_seconds = await probe.context_seconds(longest)
        on_step("work at the same time")
        prefill_share, decode_share = await probe.shares(model, longest)
        request_share = await probe.request_share(*first_tokens[0])
        handed = [await probe.send(DECODE_PROMPT_TOKENS * 2, 3) for _ in range(REPEATS)]
    overhead = overhead_of(first_tokens)
    # The decode workers ran at the same time, and slowed each other.
    slowdown = max(1.0, model.num_decode_workers * decode_share)
    steps = [(batch, seconds / slowdown) for batch, seconds in steps]
    gap = median(each.arrivals[1] - each.arrivals[0] for each in handed)
    return Calibration(
        block_tokens=model.block_size,
        block_bytes=max(each.block_bytes for each in handed),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        prefill=_rising((n, seconds - overhead) for n, seconds in first_tokens),
        decode_step=_rising(steps),
        overhead_seconds=overhead,
        handoff_seconds=max(0.0, gap - steps[0][1]),
        pull_bytes_per_second=pull_speed.bytes_per_second if pull_speed else None,
        pull_round_trip_seconds=pull_speed.round_trip_seconds if pull_speed else 0.0,
        context_seconds=context_seconds,
        prefill_share=prefill_share,
        decode_share=decode_share,
        request_share=request_share,
    )


def _rising(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points with each time at least that of less work; a decrease can only be noise."""
    amounts, seconds = zip(*points, strict=True)
    return tuple(zip(amounts, accumulate(seconds, max), strict=True))


def overhead_of(points: Sequence[Point]) -> float:
    """Return the time of a prompt without tokens, from the line that fits short prompts best.

    The shortest is left out, since decode workers compute such prompts themselves, without a push. The time
    of long ones is no line.
    """
    amounts, seconds = zip(*(points[1:4] if len(points) > 2 else points), strict=True)
    return min(max(0.0, linear_regression(amounts, seconds).intercept), 0.95 * min(y for _, y in points))


def vocabulary_of(model: ModelInfo) -> list[int]:
    """Return the tokens that do not end a sequence."""
    return sorted(set(range(model.vocab_size)) - set(model.eos_token_ids))


class _Probe:
    """Sends random prompts. No worker has cached any of their blocks."""

    def __init__(self, client: AsyncClient, model: ModelInfo, rng: Random) -> None:
        self._client = client
        self._vocabulary = vocabulary_of(model)
        self._rng = rng

    async def send(self, num_tokens: int, max_tokens: int) -> _Timed:
        prompt = self._rng.choices(self._vocabulary, k=num_tokens)
        begin, arrivals, block_bytes = time.perf_counter(), [], 0.0
        stream = self._client.stream(prompt, max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        async for delta in stream:
            arrivals += [time.perf_counter() - begin] * len(delta.token_ids)
            if delta.usage and delta.usage.blocks_shipped:
                block_bytes = delta.usage.bytes_shipped / delta.usage.blocks_shipped
        return _Timed(tuple(arrivals), block_bytes)

    async def first_tokens(self, max_model_len: int, on_step: OnStep) -> list[Point]:
        """Return the time to the first token for each of ``PROMPT_TOKENS`` that the model takes.

        Raises:
            CalibrationError: these are too few.
        """
        points: list[Point] = []
        for num_tokens in (n for n in PROMPT_TOKENS if n <= max_model_len - RESERVED_TOKENS):
            on_step(f"prompts of {num_tokens} tokens")
            points.append((num_tokens, await self._first_token_seconds(num_tokens)))
        if len(points) < 2:
            raise CalibrationError(f"the model takes {max_model_len} tokens: too few")
        return points

    async def _first_token_seconds(self, num_tokens: int) -> float:
        """Return the median time to the first token of single prompts of ``num_tokens``."""
        seconds: list[float] = []
        for _ in range(REPEATS):
            # A prompt right after another one is faster than one that comes to an idle cluster.
            await asyncio.sleep(PAUSE_SECONDS)
            seconds.append((await self.send(num_tokens, 1)).arrivals[0])
        return median(seconds)

    async def context_seconds(self, longest: int) -> float:
        """Return the time that each further token of a prompt, up to ``longest``, adds to a step."""
        short, long = [
            median([await self.step_seconds(1, num_tokens) for _ in range(REPEATS)])
            for num_tokens in (DECODE_PROMPT_TOKENS, longest)
        ]
        return max(0.0, long - short) / (longest - DECODE_PROMPT_TOKENS)

    async def step_seconds(self, num_sequences: int, num_tokens: int = DECODE_PROMPT_TOKENS) -> float:
        """Return the median time of a token while ``num_sequences`` of such prompts decode together."""
        sent: list[Awaitable[_Timed]] = [self.send(num_tokens, DECODE_TOKENS) for _ in range(num_sequences)]
        timed = await asyncio.gather(*sent)
        # While the first sequences decode, the last are still prefilled, so only the later half counts.
        half = DECODE_TOKENS // 2
        return median((t.arrivals[-1] - t.arrivals[half]) / (len(t.arrivals) - 1 - half) for t in timed)

    async def request_share(self, num_tokens: float, seconds_alone: float) -> float:
        """Return the share of the processors that a request uses outside the engines.

        It follows from the time that prompts of ``num_tokens`` take together, which are little else.
        """
        shares: list[float] = []
        for _ in range(REPEATS):
            timed = await asyncio.gather(*(self.send(int(num_tokens), 1) for _ in range(REQUESTS_AT_ONCE)))
            seconds = max(each.arrivals[0] for each in timed)
            shares.append(seconds / (REQUESTS_AT_ONCE * seconds_alone))
        return min(1.0, median(shares))

    async def shares(self, model: ModelInfo, num_tokens: int) -> tuple[float, float]:
        """Return the shares of the processors that a prompt's computation and a decode worker's steps use.

        They follow from the time that a prompt of ``num_tokens`` takes beside others, and beside sequences.
        All are measured in turns, since the speed of a machine changes from one minute to the next.
        """
        num_prefill, num_decode = max(1, model.num_prefill_workers), model.num_decode_workers
        together: list[float] = []
        beside: list[float] = []
        for _ in range(REPEATS):
            alone = await self._prompts_seconds(1, num_tokens)
            together.append(await self._prompts_seconds(num_prefill, num_tokens) / alone)
            async with self._decoding(SHARE_BATCH * num_decode, model):
                beside.append(await self._prompts_seconds(1, num_tokens) / alone)
        return shares_of(median(together), num_prefill, median(beside), num_decode)

    async def _prompts_seconds(self, num_prompts: int, num_tokens: int) -> float:
        """Return the mean time to the first tokens of prompts that are sent at once."""
        timed = await asyncio.gather(*(self.send(num_tokens, 1) for _ in range(num_prompts)))
        return mean(each.arrivals[0] for each in timed)

    @asynccontextmanager
    async def _decoding(self, num_sequences: int, model: ModelInfo) -> AsyncIterator[None]:
        """Decode sequences until the context ends."""
        most = model.max_model_len - DECODE_PROMPT_TOKENS
        sent = [asyncio.ensure_future(self.send(DECODE_PROMPT_TOKENS, most)) for _ in range(num_sequences)]
        try:
            await self.send(DECODE_PROMPT_TOKENS, 1)  # after the other prompts
            yield
        finally:
            for each in sent:
                each.cancel()
            await asyncio.gather(*sent, return_exceptions=True)


def shares_of(together: float, num_prefill: int, beside: float, num_decode: int) -> tuple[float, float]:
    """Return the shares of the processors that a prompt and a decode worker use.

    Args:
        together: how many times as long prompts take when each prefill worker computes one.
        beside: how many times as long a prompt takes beside the steps of all decode workers.
    """
    # Nobody can use more than all processors, so more than that in a measurement is noise.
    prefill_share = min(1.0, together / num_prefill)
    return prefill_share, min(1.0, max(0.0, beside - prefill_share) / num_decode)
