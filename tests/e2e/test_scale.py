"""``quire admin scale`` with the processes of one machine: workers come and go, and no answer changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from quire.client import AsyncClient
from tests.testing.commands import run_command
from tests.testing.processes import QUIRE, serving
from tests.testing.stacks import make_prompt

NUM_ANSWERS, NUM_TOKENS = 8, 300
WAIT_SECONDS = 60.0


def scale(admin_address: str, *numbers: str) -> list[str]:
    """Return the lines that ``quire admin scale`` prints."""
    command = [*QUIRE, "admin", "scale", *numbers, "--admin-address", admin_address]
    return run_command(*command, timeout=300).stdout.splitlines()


async def test_workers_are_added_and_removed_under_load(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with serving(tiny_model("llama"), tmp_path, "--admin-port", "0") as served:
        await check_scaling(await asyncio.to_thread(served.addresses))
        served.process.terminate()
        status, rest = await asyncio.to_thread(served.end)
        assert (status, rest.splitlines()[-1]) == (0, "stopped")


async def check_scaling(addresses: dict[str, str]) -> None:
    prompts = [make_prompt(40, seed) for seed in range(NUM_ANSWERS)]
    async with AsyncClient(addresses["grpc"], timeout=WAIT_SECONDS) as client:

        async def answers() -> list[list[int]]:
            calls = (
                client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)
                for seed, prompt in enumerate(prompts)
            )
            return [list(each.token_ids) for each in await asyncio.gather(*calls)]

        expected = await answers()
        steps = (
            (["decode=3"], ["decode-1 has started", "decode-2 has started"]),
            (["decode=1", "prefill=0"], ["decode-1 has left", "decode-2 has left", "prefill-0 has left"]),
            (["prefill=1"], ["prefill-0 has started"]),
            (["prefill=1", "decode=1"], ["nothing to change"]),
        )
        for numbers, printed in steps:
            running = asyncio.create_task(answers())
            assert sorted(await asyncio.to_thread(scale, addresses["admin"], *numbers)) == printed
            assert await running == expected
