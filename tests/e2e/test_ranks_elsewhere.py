"""Workers whose ranks join over connections, as on other machines: the same bits, and no half workers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from quire.kvindex.kv_layout import KvShape
from quire.models.random_model import make_random_model
from quire.protos import worker_pb2
from quire.services.launch.launcher import Started
from quire.services.local.stack import RunningStack
from quire.services.worker.config import DiskFolder
from tests.e2e.rank_requests import (
    HEADS,
    NUM_FULL,
    NUM_NEW,
    WAIT_SECONDS,
    answer,
    disaggregated,
    ended,
    local,
    sequence_of,
    source,
    stack_of_ranks,
)

SIZES = {"prefill-0": 2, "decode-0": 3, "decode-1": 1}
"""How many ranks each worker has. With two key-value heads, two of three ranks have the same one."""
PAIRS = list(permutations(SIZES, 2))
PROGRAM = "import sys; from quire.cli.main import main; sys.argv[0] = 'quire'; main()"
SECRET = "known"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("llama"), num_key_value_heads=2, **HEADS)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def start_rank(address: str, **variables: str) -> subprocess.Popen[str]:
    """Start a rank, which waits until its worker listens."""
    environment = {**os.environ, "QUIRE_CLUSTER_SECRET": SECRET, **variables}
    command = [sys.executable, "-c", PROGRAM, "rank", address, "--threads", "1"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


class Ranks:
    """The ranks of some workers, by the workers' names."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.addresses = {name: free_address() for name, size in sizes.items() if size > 1}
        self.processes = {
            name: [start_rank(address) for _ in range(1, sizes[name])]
            for name, address in self.addresses.items()
        }

    def of(self, name: str) -> list[int]:
        return [each.pid for each in self.processes[name]]

    def replace(self, name: str) -> None:
        """Start new ranks of a worker in place of those that have ended."""
        for each in self.processes[name]:
            each.communicate(timeout=WAIT_SECONDS)
        self.processes[name] = [start_rank(self.addresses[name]) for _ in self.processes[name]]

    def close(self) -> None:
        for each in (process for some in self.processes.values() for process in some):
            each.kill()
            each.communicate()


@pytest.fixture(scope="module")
def start(model: Path) -> Callable[..., Any]:
    """Return what starts a stack whose workers have these numbers of ranks, by name, and the ranks."""

    @contextmanager
    def start(sizes: dict[str, int], **settings: Any) -> Iterator[tuple[RunningStack, Ranks]]:
        ranks = Ranks(sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUIRE_CLUSTER_SECRET", SECRET)
            try:
                with stack_of_ranks(model, sizes, ranks.addresses, max_model_len=500, **settings) as stack:
                    yield stack, ranks
            finally:
                ranks.close()

    return start


@pytest.fixture(scope="module")
def stack(start: Callable[..., Any]) -> Iterator[RunningStack]:
    with start(SIZES) as (running, _):
        yield running


async def test_every_pair_of_workers_gives_the_same_bits(stack: RunningStack, e2e: Any) -> None:
    """Each pair has a prompt that neither knows; then both know it."""
    async with e2e.connected(stack) as (_, workers):
        for seed, (prefill, decode) in enumerate(PAIRS, start=100):
            prompt = e2e.make_prompt(150, seed=seed)
            [other] = SIZES.keys() - {prefill, decode}
            given, accepted, computed = await disaggregated(workers, prefill, decode, prompt)
            assert (accepted.num_cached_tokens, computed.num_cached_tokens) == (0, 0)
            assert len(given) == NUM_NEW
            assert given == (await local(workers, other, prompt))[0], (prefill, decode)
            again, accepted, computed = await disaggregated(workers, prefill, decode, prompt)
            assert again == given
            assert accepted.num_cached_tokens
            assert computed.num_cached_tokens
        await e2e.quiet(workers)


@pytest.mark.parametrize(("owner", "taker"), PAIRS)
async def test_blocks_are_pulled_whole(stack: RunningStack, e2e: Any, owner: str, taker: str) -> None:
    async with e2e.connected(stack) as (_, workers):
        prompt = e2e.make_prompt(200, seed=300 + 10 * SIZES[owner] + SIZES[taker])
        call = workers[owner].Prefill(worker_pb2.PrefillRequest(sequence=sequence_of(prompt)))
        assert [message async for message in call]
        given, accepted = await local(workers, taker, prompt, pull_from=await source(stack, workers, owner))
        assert (accepted.pulled.num_blocks, accepted.pulled.failure) == (NUM_FULL, "")
        [other] = SIZES.keys() - {owner, taker}
        assert given == (await local(workers, other, prompt))[0]
        await e2e.quiet(workers)


@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), [("auto", "float32"), ("int8", "int8")])
async def test_blocks_cycle_through_host_memory_and_disk(
    start: Callable[..., Any], e2e: Any, tmp_path: Path, kv_cache_dtype: str, dtype: str
) -> None:
    """Rank 0 has the tiers below the pool. They are the same for a worker of one process."""
    block_bytes = KvShape(3, 2, 16, 32, dtype).block_bytes
    settings = {
        "num_blocks": 26,
        "max_num_seqs": 4,
        "kv_cache_dtype": kv_cache_dtype,
        "host_cache_bytes": 20 * block_bytes,
        "disk_cache": DiskFolder(str(tmp_path), 400 * (block_bytes + 32)),
    }
    prompts = [e2e.make_prompt(200, seed=40 + index) for index in range(4)]
    tokens, cached = [], []
    for sizes in ({"prefill-0": 1, "decode-0": 2}, {"prefill-0": 2, "decode-0": 1}):
        with start(sizes, **settings) as (stack, _):
            async with e2e.connected(stack) as (client, workers):
                for prompt in (*prompts, *prompts):
                    response = await client.generate(prompt, temperature=0.8, seed=1, max_tokens=NUM_NEW)
                    tokens.append(list(response.token_ids))
                    cached.append(response.usage.cached_prompt_tokens)
                    await e2e.quiet(workers)
    assert tokens == tokens[:4] * 4
    assert cached[:4] == [0] * 4
    assert all(each >= NUM_FULL // 2 * 16 for each in cached[4:8]), cached
    assert sum(cached[8:12]) >= 2 * NUM_FULL * 16, cached


async def begin_answers(client: Any, workers: Any, prompts: list[list[int]]) -> list[asyncio.Task[Any]]:
    """Ask for long answers, and wait until the worker with ranks decodes some."""
    begun = [asyncio.Event() for _ in prompts]
    answers = [
        asyncio.create_task(answer(client, prompt, has_begun))
        for prompt, has_begun in zip(prompts, begun, strict=True)
    ]
    await asyncio.gather(*(each.wait() for each in begun))
    while not (await workers["decode-0"].GetLoad(worker_pb2.GetLoadRequest())).num_running:
        await asyncio.sleep(0.001)
    return answers


@pytest.mark.parametrize("victim", ["worker", "rank", "stopped rank"])
async def test_answers_go_on_elsewhere_and_the_worker_comes_back(
    start: Callable[..., Any], e2e: Any, victim: str
) -> None:
    with start({"prefill-0": 1, "decode-0": 3, "decode-1": 1}, num_blocks=512) as (stack, ranks):
        first, others = stack.workers["decode-0"].process.pid, ranks.of("decode-0")
        async with e2e.connected(stack) as (client, workers), asyncio.timeout(2 * WAIT_SECONDS):
            prompts = [e2e.make_prompt(60, seed=30 + index) for index in range(6)]
            expected = [await answer(client, prompt) for prompt in prompts]
            answers = await begin_answers(client, workers, prompts)
            sent = signal.SIGSTOP if victim == "stopped rank" else signal.SIGKILL
            os.kill(first if victim == "worker" else others[0], sent)
            # A process that is stopped elsewhere cannot be ended from here.
            assert await ended([first, others[1]]) < 15
            assert await asyncio.gather(*answers) == expected
            os.kill(others[0], signal.SIGKILL)
            ranks.replace("decode-0")
            while not any(isinstance(each, Started) for each in await asyncio.to_thread(stack.wait)):
                pass
            assert [await answer(client, prompt) for prompt in prompts] == expected


async def test_a_rank_that_is_told_to_end_lets_its_worker_drain(start: Callable[..., Any], e2e: Any) -> None:
    with start({"prefill-0": 1, "decode-0": 2, "decode-1": 1}, num_blocks=512) as (stack, ranks):
        async with e2e.connected(stack) as (client, workers), asyncio.timeout(WAIT_SECONDS):
            prompts = [e2e.make_prompt(60, seed=30 + index) for index in range(4)]
            expected = [await answer(client, prompt) for prompt in prompts]
            answers = await begin_answers(client, workers, prompts)
            [rank] = ranks.processes["decode-0"]
            rank.terminate()
            assert await asyncio.gather(*answers) == expected
            await ended([rank.pid])
            assert rank.stderr is not None
            assert "event=rank_ended" in rank.stderr.read()
            assert rank.wait() == 0
