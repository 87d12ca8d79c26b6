"""Signals for ``quire serve``: the first lets requests end, the second ends at once, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from quire.client import AsyncClient, Unavailable
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from tests.testing.processes import Served, children_of, have_ended, serving
from tests.testing.rpc_errors import error_of
from tests.testing.stacks import make_prompt
from tests.testing.until import until

NUM_CLIENTS = 16
NUM_TOKENS = 480
NUM_ANSWERS, NUM_UNREAD_TOKENS = 64, 150
WAIT_SECONDS = 60.0
# A window so small that the answers do not fit.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command keeps temporary files."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture
def serve(tiny_model: Callable[[str], Path], folder: Path) -> Iterator[Served]:
    with serving(tiny_model("llama"), folder, "--grace-period", "120") as started:
        yield started


async def begin(client: AsyncClient, prompts: list[list[int]]) -> list[asyncio.Task[int]]:
    """Begin answers and return tasks for how many tokens each gets."""
    has_begun = [asyncio.Event() for _ in prompts]

    async def finish(prompt: list[int], begun: asyncio.Event) -> int:
        count = 0
        async for delta in client.stream(prompt, max_tokens=NUM_TOKENS, ignore_eos=True):
            begun.set()
            count += len(delta.token_ids)
        return count

    tasks = [asyncio.create_task(finish(*each)) for each in zip(prompts, has_begun, strict=True)]
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(event.wait() for event in has_begun))
    return tasks


@asynccontextmanager
async def unread(address: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Begin a stream that cannot end, since its client does not read it.

    Yields a function that reads the rest and returns the number of tokens.
    """
    request = pb.GenerateStreamRequest(
        generation=pb.Generation(
            token_ids=pb.TokenIds(ids=[5, 6, 7]),
            sampling=pb.SamplingParams(n=NUM_ANSWERS),
            stopping=pb.StoppingParams(max_tokens=NUM_UNREAD_TOKENS, ignore_eos=True),
        )
    )
    async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
        messages = aiter(GenerationServiceStub(channel).GenerateStream(request))
        first = await anext(messages)

        async def read() -> int:
            return len(first.token_ids) + sum([len(each.token_ids) async for each in messages])

        yield read


async def test_ctrl_c_lets_requests_end(serve: Served, folder: Path) -> None:
    address = (await asyncio.to_thread(serve.addresses))["grpc"]
    async with AsyncClient(address) as client:
        async with unread(address) as read:
            running = await begin(client, [make_prompt(20, seed) for seed in range(NUM_CLIENTS)])
            os.killpg(serve.process.pid, signal.SIGINT)
            line = await asyncio.to_thread(serve.line, "stopping: ")
            assert f"waiting for {NUM_CLIENTS + 1} requests" in line
            with pytest.raises(Unavailable, match="this router is stopping"):
                await client.generate([2, 3], max_tokens=1)
            assert await read() == NUM_ANSWERS * NUM_UNREAD_TOKENS
        assert await asyncio.gather(*running) == [NUM_TOKENS] * NUM_CLIENTS
    status, rest = await asyncio.to_thread(serve.end)
    assert (status, rest.splitlines()[-1]) == (0, "stopped")
    assert "cut off" not in rest
    assert not os.listdir(folder)


async def test_the_second_signal_ends_it_at_once(serve: Served, folder: Path) -> None:
    address = (await asyncio.to_thread(serve.addresses))["grpc"]
    async with unread(address) as read:
        children = children_of(serve.process.pid)
        serve.process.terminate()
        await asyncio.to_thread(serve.line, "waiting for 1 request,")
        serve.process.terminate()
        status, rest = await asyncio.wait_for(asyncio.to_thread(serve.end), 10)
        assert (status, "Traceback" in rest) == (128 + signal.SIGTERM, False)
        await error_of(read(), grpc.StatusCode.UNAVAILABLE)
    assert not os.listdir(folder)
    # Redis, the router, two workers, and multiprocessing's fork server and tracker of resources.
    assert len(children) >= 6
    # The helpers of multiprocessing end by themselves when they see that their parent has.
    await until(lambda: have_ended(children))


def test_ctrl_c_during_the_start_leaves_no_process(serve: Served, folder: Path) -> None:
    # Redis, multiprocessing's fork server and tracker of resources, and the router.
    while len(children_of(serve.process.pid)) < 4:
        assert serve.process.poll() is None
        time.sleep(0.005)
    os.killpg(serve.process.pid, signal.SIGINT)
    status, rest = serve.end()
    assert (status, rest.splitlines()[-1]) == (0, "stopped")
    assert "Traceback" not in rest
    assert not os.listdir(folder)
