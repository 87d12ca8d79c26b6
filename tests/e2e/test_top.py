"""``quire top`` on a real stack: under load its numbers move, and they survive the router's end."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import pytest

from quire.cli.top.snapshot import Change, Name, Snapshot, take_snapshot
from quire.client import Unavailable
from quire.client.admin import AdminClient, WorkerStatus
from quire.services.local.stack import RunningStack
from tests.testing.stacks import GREEDY, StartStack, connect, make_prompt, wait_until_idle
from tests.testing.until import until

LENGTH = 400
ANSWER = 48


def num_used(workers: tuple[WorkerStatus, ...]) -> int:
    return sum(each.load.used_blocks for each in workers if each.load)


async def test_blocks_requests_and_rates_move_under_load(stack: RunningStack) -> None:
    with AdminClient(stack.admin_address) as admin:
        async with connect(stack) as (client, workers):
            is_seen = asyncio.Event()

            async def answer_until_seen() -> None:
                while not is_seen.is_set():
                    await client.generate(make_prompt(LENGTH, 69), max_tokens=ANSWER, **GREEDY)

            async def snapshot_under_load() -> Snapshot | None:
                taken = await asyncio.to_thread(take_snapshot, admin)
                is_running = (taken.pages[""][Name.RUNNING, ""] or 0) > 0
                return taken if is_running and num_used(taken.status.workers) > 0 else None

            answering = asyncio.create_task(answer_until_seen())
            during = await until(snapshot_under_load)
            is_seen.set()
            await answering
            await wait_until_idle(workers)
            before = await asyncio.to_thread(take_snapshot, admin)
            prompts = [make_prompt(LENGTH, seed) for seed in range(70, 76)]
            await asyncio.gather(*(client.generate(each, max_tokens=ANSWER, **GREEDY) for each in prompts))
            await wait_until_idle(workers)
            after = await asyncio.to_thread(take_snapshot, admin)
    assert set(during.pages) == {"", "decode-0", "prefill-0"}
    assert num_used(before.status.workers) == num_used(after.status.workers) == 0
    assert after.pages[""][Name.RUNNING, ""] == 0
    change = Change(after, before)
    assert change.increase(Name.PROMPT_TOKENS) == len(prompts) * LENGTH
    assert change.increase(Name.GENERATED_TOKENS) == len(prompts) * ANSWER
    assert change.increase(Name.SUCCESSES) == len(prompts)
    assert (change.increase(Name.STEP_TOKENS, of="prefill-0") or 0) >= len(prompts) * (LENGTH - 16)
    assert (change.increase(Name.STEP_TOKENS, of="decode-0") or 0) >= len(prompts) * (ANSWER - 2)
    assert change.increase(Name.PUSHES, of="prefill-0") == len(prompts)
    sent = change.increase(Name.MOVED_BYTES, "sent", of="prefill-0")
    assert sent == change.increase(Name.MOVED_BYTES, "received", of="decode-0")
    assert sent
    [tenant], [earlier] = after.status.tenants, before.status.tenants or [None]
    assert tenant.num_tokens - (earlier.num_tokens if earlier else 0) == len(prompts) * (LENGTH + ANSWER)
    quickest, slowest = change.time_to_first_token(0.01), change.time_to_first_token(0.99)
    assert quickest is not None
    assert slowest is not None
    assert 0 < quickest <= slowest < 60


async def test_the_command_prints_once_over_a_pipe(stack: RunningStack) -> None:
    command = (sys.executable, "-c", "from quire.cli.main import main; main()", "top")
    process = await asyncio.create_subprocess_exec(
        *command, "--once", "--admin-address", stack.admin_address, stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await asyncio.wait_for(process.communicate(), 60)
    text = stdout.decode()
    assert process.returncode == 0
    assert "\x1b" not in text
    for worker in ("decode-0", "prefill-0"):
        assert re.search(rf"{worker} .*serving +[▄▁]+ +0% ", text), text
    assert "0 running" in text


async def test_a_worker_that_ends_and_a_router_that_ends_are_noticed(start_stack: StartStack) -> None:
    with start_stack("llama", num_decode=2) as stack, AdminClient(stack.admin_address) as admin:
        assert set(take_snapshot(admin).pages) == {"", "decode-0", "decode-1", "prefill-0"}
        stack.workers["decode-1"].process.kill()
        await _until_unreached(admin, "decode-1")
        for child in stack.routers.values():
            child.process.kill()
            child.process.join()
        with pytest.raises(Unavailable):
            take_snapshot(admin)


async def _until_unreached(admin: AdminClient, worker_id: str) -> Any:
    async with asyncio.timeout(60):
        while worker_id in (await asyncio.to_thread(take_snapshot, admin)).pages:
            await asyncio.sleep(0.01)
