"""``quire admin scale`` with the processes of one machine: workers come and go, and no answer changes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.client import AsyncClient
from tests.testing.stacks import QUIRE, make_prompt

NUM_ANSWERS, NUM_TOKENS = 8, 300
WAIT_SECONDS = 60.0


@pytest.fixture
def banner(tiny_model: Callable[[str], Path], tmp_path: Path) -> Iterator[str]:
    """Run ``quire serve`` and yield what it says of itself."""
    ports = ["--port", "0", "--http-port", "0", "--admin-port", "0"]
    settings = ["--dtype", "float32", "--num-blocks", "2048", *ports]
    with subprocess.Popen(
        [*QUIRE, "serve", str(tiny_model("llama")), *settings],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if line.startswith("  admin"):
                    break
            yield "".join(lines)
            process.terminate()
            _, rest = process.communicate(timeout=WAIT_SECONDS)
            assert (process.returncode, rest.splitlines()[-1]) == (0, "stopped")
        finally:
            process.kill()


def scale(admin_address: str, *numbers: str) -> list[str]:
    """Return the lines that ``quire admin scale`` prints."""
    command = [*QUIRE, "admin", "scale", *numbers, "--admin-address", admin_address]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


async def test_workers_are_added_and_removed_under_load(banner: str) -> None:
    found = re.search(r"serves .*? at (\S+).*?  admin +(\S+)", banner, re.DOTALL)
    assert found is not None, banner
    address, admin_address = found.groups()
    assert re.findall(r"^  (\S+) .*, processors? \d[\d,-]*", banner, re.MULTILINE) == [
        "decode-0",
        "prefill-0",
    ]
    prompts = [make_prompt(40, seed) for seed in range(NUM_ANSWERS)]
    async with AsyncClient(address, timeout=WAIT_SECONDS) as client:

        async def answers() -> list[list[int]]:
            calls = (
                client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed)
                for seed, prompt in enumerate(prompts)
            )
            return [list(each.token_ids) for each in await asyncio.gather(*calls)]

        expected = await answers()
        steps = (
            (["decode=3"], ["decode-1 serves", "decode-2 serves"]),
            (["decode=1", "prefill=0"], ["decode-1 has left", "decode-2 has left", "prefill-0 has left"]),
            (["prefill=1"], ["prefill-0 serves"]),
            (["prefill=1", "decode=1"], ["nothing to change"]),
        )
        for numbers, printed in steps:
            running = asyncio.create_task(answers())
            assert sorted(await asyncio.to_thread(scale, admin_address, *numbers)) == printed
            assert await running == expected
