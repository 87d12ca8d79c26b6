"""``quire serve --ray`` over three nodes: scaling and a node's end lose no answer and change no token."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from quire.client import AsyncClient, Unsupported
from quire.client.admin import AdminClient, WorkerStatus
from tests.testing.commands import run_command
from tests.testing.processes import QUIRE, serving
from tests.testing.stacks import make_prompt

NUM_ANSWERS, NUM_TOKENS = 8, 400
WAIT_SECONDS = 240.0

if find_spec("ray") is None:
    pytest.skip("Ray has no wheel for this Python", allow_module_level=True)


class RayCluster(NamedTuple):
    """A Ray cluster, whose nodes another process runs; see ``ray_nodes``."""

    process: subprocess.Popen[str]
    address: str
    raylets: list[int]

    def remove_node(self, raylet: int) -> None:
        """End the node of a raylet, as if its machine had failed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(raylet, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "removed\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Run three nodes on this machine; the first has room for no worker, each other one for three."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray then keeps to the loopback, here and in the processes that inherit this.
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # By default Ray's processes give way to the other tests, and then take minutes.
        patch.setenv("RAY_worker_niceness", "0")
        command = [sys.executable, "-m", "tests.e2e.ray_nodes"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        ) as nodes:
            assert nodes.stdin is not None
            assert nodes.stdout is not None
            try:
                yield RayCluster(nodes, **json.loads(nodes.stdout.readline()))
                nodes.stdin.close()
                nodes.wait(WAIT_SECONDS)
            finally:
                nodes.kill()


@pytest.fixture(scope="module")
def addresses(
    cluster: RayCluster, tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    settings = ["--ray", cluster.address, "--threads", "1", "--decode", "2"]
    with serving(tiny_model("llama"), tmp_path_factory.mktemp("ray"), *settings) as served:
        yield served.addresses()
        served.process.send_signal(signal.SIGINT)
        status, rest = served.end()
        assert (status, rest.splitlines()[-1]) == (0, "stopped")


async def answers(client: AsyncClient, prompts: list[list[int]]) -> list[asyncio.Task[list[int]]]:
    """Begin answers, and return tasks for their tokens once each has begun."""
    begun = [asyncio.Event() for _ in prompts]

    async def answer(prompt: list[int], event: asyncio.Event, seed: int) -> list[int]:
        tokens: list[int] = []
        async for delta in client.stream(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed):
            event.set()
            tokens += delta.token_ids
        return tokens

    pairs = zip(prompts, begun, strict=True)
    tasks = [asyncio.create_task(answer(*each, seed)) for seed, each in enumerate(pairs)]
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


def num_children(raylet: int) -> int:
    """Return how many processes the workers of a node are: each one's parent is its actor."""
    family = psutil.Process(raylet).children(recursive=True)
    return sum("multiprocessing" in " ".join(each.cmdline()) for each in family)


async def until(admin: AdminClient, condition: Callable[[list[WorkerStatus]], bool]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition(await asyncio.to_thread(admin.workers)):
            await asyncio.sleep(0.1)


def is_quiet(workers: list[WorkerStatus]) -> bool:
    return all(each.load is not None and each.load.used_blocks == 0 for each in workers)


def names(workers: list[WorkerStatus]) -> list[str]:
    return [each.worker_id for each in workers]


async def test_scaling_and_the_end_of_a_node_change_no_token(
    addresses: dict[str, str], cluster: RayCluster
) -> None:
    prompts = [make_prompt(40, seed) for seed in range(NUM_ANSWERS)]
    async with AsyncClient(addresses["grpc"], timeout=WAIT_SECONDS) as client:
        with AdminClient(addresses["admin"], timeout=WAIT_SECONDS) as admin:
            expected = await asyncio.gather(*await answers(client, prompts))
            assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * NUM_ANSWERS

            running = await answers(client, prompts)
            scaled = await asyncio.to_thread(admin.scale, {"decode": 3})
            assert (list(scaled.started), scaled.left) == (["decode-2"], [])
            running += await answers(client, prompts)
            scaled = await asyncio.to_thread(admin.scale, {"decode": 2})
            assert (scaled.started, list(scaled.left)) == ([], ["decode-2"])
            assert await asyncio.gather(*running) == expected * 2
            everyone = ["decode-0", "decode-1", "prefill-0"]
            await until(admin, lambda workers: names(workers) == everyone and is_quiet(workers))

            with pytest.raises(Unsupported, match="decode 1 to 256"):
                await asyncio.to_thread(admin.scale, {"decode": 0})

            running = await answers(client, prompts)
            raylet = max(cluster.raylets, key=num_children)
            assert num_children(raylet)
            await asyncio.to_thread(cluster.remove_node, raylet)
            assert await asyncio.gather(*running) == expected
            await until(admin, lambda workers: names(workers) == everyone and is_quiet(workers))


def test_a_missing_ray_cluster_is_reported(tiny_model: Callable[[str], Path]) -> None:
    arguments = ["serve", "--ray", "127.0.0.1:1", "--port", "0"]
    done = run_command(*QUIRE, *arguments, tiny_model("llama"), status=1, timeout=WAIT_SECONDS)
    assert "quire serve: no Ray cluster at 127.0.0.1:1" in done.stderr
