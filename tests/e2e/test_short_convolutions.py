"""Answers of models with convolutions or states go on elsewhere when their worker is killed or drains."""

from __future__ import annotations

import asyncio
import signal
from multiprocessing.connection import wait
from typing import Any

import pytest

from quire.services.local.stack import RunningStack
from tests.testing.stacks import GREEDY, StartStack, connect, kill_busy_worker, make_prompt

NUM_NEW, NUM_BEFORE, WAIT_SECONDS = 400, 50, 60.0


def wait_for_exit(stack: RunningStack) -> None:
    """Wait until a worker has ended."""
    assert wait([each.process.sentinel for each in stack.workers.values()], WAIT_SECONDS)


@pytest.mark.parametrize(
    ("copy_answers", "how"), [(False, signal.SIGKILL), (True, signal.SIGKILL), (False, signal.SIGTERM)]
)
@pytest.mark.parametrize("architecture", ["lfm2", "bamba", "qwen3_next"])
async def test_an_answer_goes_on_elsewhere(
    architecture: str, start_stack: StartStack, check_greedy: Any, copy_answers: bool, how: signal.Signals
) -> None:
    with start_stack(architecture, num_decode=2, copy_answers=copy_answers) as stack:
        async with connect(stack) as (client, workers):
            prompt, tokens, is_killed = make_prompt(100), list[int](), False
            async for delta in client.stream(prompt, max_tokens=NUM_NEW, **GREEDY):
                tokens += delta.token_ids
                if len(tokens) >= NUM_BEFORE and not is_killed:
                    is_killed = True
                    await kill_busy_worker(stack, workers, how)
            if how is signal.SIGTERM:
                await asyncio.to_thread(wait_for_exit, stack)
            assert [stack.workers[name].process.is_alive() for name in workers].count(False) == 1
            check_greedy(architecture, prompt, tokens, NUM_NEW)
