"""An index that is built from workers' KV events alone agrees with the one in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from redis.asyncio import Redis
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from quire.kvindex.event_frames import public_hash
from quire.kvindex.redis_index import BLOCKS, LEASES
from quire.kvindex.worker_record import WorkerRecord
from quire.services.local.redis_process import RedisProcess
from quire.services.server.process import free_port
from tests.testing.forked import Forked
from tests.testing.kv_event_mirror import KvEventMirror, free_events_port, mirrored
from tests.testing.processes import worker_process
from tests.testing.stacks import make_prompt

START_SECONDS = 120.0
SETTLE_SECONDS = 30.0
NUM_REQUESTS = 20
NUM_BLOCKS = 80
"""The prompts of one worker have more."""
SETTINGS = ("--num-blocks", str(NUM_BLOCKS), "--max-model-len", "512", "--vllm-grpc")


class Worker:
    """A decode worker in a process of its own, and the mirror of its blocks."""

    def __init__(self, model: Path, redis: RedisProcess, mirror: KvEventMirror, events_port: int) -> None:
        self._model, self._redis, self._events_port = model, redis, events_port
        self._port = free_port()
        self._process: Forked | None = None
        self.address = f"127.0.0.1:{self._port}"
        self.mirror = mirror

    def start(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        """Start the process, on the same ports each time."""
        monkeypatch.setenv("QUIRE_KV_EVENTS", f"127.0.0.1:{self._events_port}")
        settings = (*SETTINGS, "--port", str(self._port))
        self._process = stack.enter_context(worker_process(self._model, self._redis.worker_url, *settings))

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    async def answer(self, random: Random) -> None:
        """Send a prompt that may begin like an earlier one."""
        prompt = make_prompt(160, seed=random.randrange(6))[: random.randrange(170)]
        prompt += make_prompt(random.randrange(1, 120), seed=random.randrange(10**6))
        message = vllm.GenerateRequest(
            request_id=f"r-{random.random()}",
            tokenized=vllm.TokenizedInput(input_ids=prompt),
            sampling_params=vllm.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        )
        async with grpc.aio.insecure_channel(self.address) as channel:
            stream = VllmEngineStub(channel).Generate(message, wait_for_ready=True, timeout=START_SECONDS)
            async for _ in stream:
                pass

    async def reset(self) -> None:
        request = common_pb2.FlushCacheRequest(timeout_s=SETTLE_SECONDS)
        async with grpc.aio.insecure_channel(self.address) as channel:
            assert (await VllmEngineStub(channel).FlushCache(request)).success


async def blocks_in_redis(client: Any, address: str) -> set[int]:
    """Return the blocks of the workers that have a lease and this address."""
    epochs = {}
    async for key in client.scan_iter(f"{LEASES}*"):
        lease = await client.hgetall(key)
        if lease and WorkerRecord.from_json(lease[b"r"]).address == address:
            epochs[key.removeprefix(LEASES.encode())] = lease[b"e"]
    found = set()
    async for key in client.scan_iter(f"{BLOCKS}*"):
        if epochs.items() & (await client.hgetall(key)).items():
            found.add(public_hash(key.removeprefix(BLOCKS.encode())))
    return found


async def until_agreed(client: Any, worker: Worker) -> int:
    """Wait until a worker's mirror has the same blocks as Redis; return their number."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while await blocks_in_redis(client, worker.address) != {*worker.mirror.parents}:
            await asyncio.sleep(0.05)
    return len(worker.mirror.parents)


@pytest.mark.slow
async def test_a_mirror_agrees_with_redis_after_evictions_a_reset_and_a_killed_worker(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    random, model = Random(5), tiny_model("llama")
    is_lossy = True
    with RedisProcess() as redis, ExitStack() as processes:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(Redis.from_url(redis.url))
            workers = []
            for _ in range(2):
                port = free_events_port()
                lossy = mirrored(port, lambda: is_lossy and random.random() < 0.3)
                workers.append(Worker(model, redis, await stack.enter_async_context(lossy), port))
                workers[-1].start(processes, monkeypatch)
            stayed, killed = workers

            async def run(num_requests: int) -> None:
                await asyncio.gather(*(each.answer(random) for each in workers for _ in range(num_requests)))

            await run(NUM_REQUESTS)
            await stayed.reset()
            running = [asyncio.create_task(killed.answer(random)) for _ in range(NUM_REQUESTS)]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            killed.kill()
            failures = await asyncio.gather(*running, return_exceptions=True)
            assert any(failures)
            killed.start(processes, monkeypatch)
            await run(NUM_REQUESTS)
            is_lossy = False
            await run(1)  # shows the mirrors what they have missed
            for each in workers:
                assert NUM_BLOCKS / 2 < await until_agreed(client, each) <= NUM_BLOCKS
                assert each.mirror.num_replays
            await stayed.reset()
            assert await until_agreed(client, stayed) == 0
