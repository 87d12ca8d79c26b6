"""Long answers of all kinds whose worker drains or is killed: the same tokens, and little computed again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.client.admin import AdminClient
from quire.services.local.stack import RunningStack
from quire.services.router.migration.copies import INTERVAL_TOKENS, MAX_MISSING_BLOCKS
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle

WAIT_SECONDS = 120.0
ENDLESS = 32_000
"""Tokens of answers that outlast every step of a test; each test ends them itself."""
BLOCK_SIZE = 16
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 1},
    "top_p and penalties": {"temperature": 1.2, "seed": 2, "top_p": 0.9, "presence_penalty": 0.5},
    "several": {"temperature": 1.0, "seed": 3, "n": 2},
    "logprobs": {"temperature": 0.7, "seed": 4, "logprobs": 2},
}


@pytest.fixture
def start_long(start_stack: StartStack, tiny_model: Callable[..., Path]) -> Callable[..., Any]:
    """Return a function that starts a stack of a tiny Llama with a long context."""
    model = tiny_model("llama", max_position_embeddings=32_768)
    return lambda **settings: start_stack("llama", **{"num_blocks": 8192, "model": str(model), **settings})


class Answer:
    """An answer that a task reads until it is stopped."""

    def __init__(self, client: AsyncClient, prompt: list[int], options: dict[str, Any]) -> None:
        self.tokens: dict[int, list[int]] = {index: [] for index in range(options.get("n", 1))}
        self.num_retries = 0
        self._options = {**options, "ignore_eos": True}
        self._client, self._prompt = client, prompt
        self._has_grown = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for delta in self._client.stream(self._prompt, max_tokens=ENDLESS, **self._options):
            self.tokens[delta.index] += delta.token_ids
            self._has_grown.set()

    @property
    def num_tokens(self) -> int:
        return min(map(len, self.tokens.values()))

    async def grow_to(self, num_tokens: int) -> None:
        """Return when each answer has that many tokens."""
        async with asyncio.timeout(WAIT_SECONDS):
            while self.num_tokens < num_tokens:
                self._has_grown.clear()
                assert not self._reading.done(), self._reading
                await self._has_grown.wait()

    async def stop(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def check(self) -> None:
        """Compare with the same answer of an undisturbed request."""
        whole = await self._client.generate(self._prompt, max_tokens=self.num_tokens, **self._options)
        expected = [list(choice.token_ids) for choice in whole.choices]
        assert [tokens[: self.num_tokens] for tokens in self.tokens.values()] == expected


def num_computed(stack: RunningStack, name: str) -> tuple[float, float]:
    """Return how many tokens a worker has computed, and in how many steps."""
    steps = metric(stack, name, "quire_step_tokens_count")
    return metric(stack, name, "quire_step_tokens_sum"), steps


async def test_answers_of_all_kinds_move(start_long: Callable[..., Any]) -> None:
    """Each worker has nothing left to do while all its answers go on, and the first one takes them back."""
    prompts = [make_prompt(40, seed) for seed in range(len(KINDS))]
    with start_long(num_decode=2) as stack, AdminClient(stack.admin_address) as admin:
        async with connect(stack) as (client, workers):
            answers = [Answer(client, *each) for each in zip(prompts, KINDS.values(), strict=True)]
            await asyncio.gather(*(answer.grow_to(40) for answer in answers))
            await asyncio.to_thread(admin.drain, "decode-0")
            await wait_until_idle({"decode-0": workers["decode-0"]})
            await asyncio.gather(*(answer.grow_to(answer.num_tokens + 40) for answer in answers))
            await asyncio.to_thread(admin.drain, "decode-0", undo=True)
            process = stack.workers["decode-1"].process
            process.terminate()
            await asyncio.to_thread(process.join, WAIT_SECONDS)
            assert process.exitcode == 0
            await asyncio.gather(*(answer.grow_to(answer.num_tokens + 40) for answer in answers))
            await asyncio.gather(*(answer.stop() for answer in answers))
            await asyncio.gather(*(answer.check() for answer in answers))


async def test_a_move_or_a_copy_saves_what_was_computed(start_long: Callable[..., Any]) -> None:
    with start_long(num_prefill=0, num_decode=3, copy_answers=True) as stack:
        async with connect(stack) as (client, workers):
            answer = Answer(client, make_prompt(40), {"temperature": 1.0, "seed": 5})
            await answer.grow_to(400)
            for how in (signal.SIGTERM, signal.SIGKILL):
                before = {name: num_computed(stack, name) for name in workers}
                num_tokens = answer.num_tokens
                await answer.grow_to(num_tokens + 2 * INTERVAL_TOKENS)
                begun = max(workers, key=lambda name: num_computed(stack, name)[0] - before[name][0])
                del workers[begun], before[begun]
                num_tokens = answer.num_tokens
                process = stack.workers[begun].process
                assert process.pid is not None
                os.kill(process.pid, how)
                await asyncio.to_thread(process.join, WAIT_SECONDS)
                await answer.grow_to(answer.num_tokens + 100)
                grown = [
                    now - then
                    for name in workers
                    for now, then in zip(num_computed(stack, name), before[name], strict=True)
                ]
                # Each step but the first computes one token.
                num_again = sum(grown[::2]) - sum(grown[1::2])
                assert num_again < (
                    MAX_MISSING_BLOCKS * BLOCK_SIZE if how is signal.SIGTERM else num_tokens / 2
                )
            await answer.stop()
            await answer.check()
