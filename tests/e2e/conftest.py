"""Real stacks: router, workers and Redis as processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.client import AsyncClient
from quire.models.random_model import make_random_model
from quire.protos import worker_pb2 as pb
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.routing.placement import PolicyConfig
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

# Threads that spin beside the workers' would slow both down many times over.
torch.set_num_threads(1)

OF_STACKS, OF_ROUTERS, OF_WORKERS = (
    {field.name for field in fields(config)} for config in (LocalStackConfig, RouterConfig, WorkerConfig)
)
NUM_NEW = 64
QUIET_SECONDS = 20.0


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from architecture name to the folder of its tiny random model."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_random_model(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get


@pytest.fixture(scope="session")
def expected(tiny_model: Callable[[str], Path]) -> Callable[[str, list[int]], list[int]]:
    """Return a function from (architecture, prompt) to the greedy tokens of transformers' generate."""
    models: dict[str, Any] = {}

    def generate(architecture: str, prompt: list[int]) -> list[int]:
        if architecture not in models:
            models[architecture] = AutoModelForCausalLM.from_pretrained(
                tiny_model(architecture), dtype=torch.float32, attn_implementation="eager"
            )
        ids = torch.tensor([prompt])
        output = models[architecture].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NUM_NEW,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return generate


@pytest.fixture(scope="session")
def start_stack(tiny_model: Callable[[str], Path]) -> Callable[..., AbstractContextManager[RunningStack]]:
    """Return a function that starts a stack of an architecture's tiny model."""

    def start(architecture: str, **settings: Any) -> AbstractContextManager[RunningStack]:
        assert set(settings) <= OF_STACKS | OF_ROUTERS | OF_WORKERS
        # The shortest prompts cross processes too.
        router = {"port": 0, "placing": PolicyConfig(local_prefill_tokens=0)}
        worker = {"role": "decode", "model": str(tiny_model(architecture)), "dtype": "float32"}
        config = LocalStackConfig(
            **_of(OF_STACKS, settings),
            router=RouterConfig(**{**router, **_of(OF_ROUTERS, settings)}),
            worker=WorkerConfig(**{**worker, "num_blocks": 2048, **_of(OF_WORKERS, settings)}),
            log_level="error",
        )
        return local_stack(config)

    return start


def _of(names: set[str], settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


@pytest.fixture(scope="session")
def stack(start_stack: Callable[..., AbstractContextManager[RunningStack]]) -> Iterator[RunningStack]:
    """Run one prefill and one decode worker of the tiny Llama, for all tests that leave it as it was.

    A test that stops or kills a process, or that needs other settings, starts a stack of its own.
    """
    with start_stack("llama") as running:
        yield running


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return Random(seed * 1000 + length).choices(range(2, 258), k=length)


@asynccontextmanager
async def connected(stack: RunningStack) -> AsyncIterator[tuple[AsyncClient, dict[str, WorkerServiceStub]]]:
    """Yield a client of the router and a stub of each worker."""
    async with AsyncClient(stack.address) as client:
        channels = {name: grpc.aio.insecure_channel(w.address) for name, w in stack.ready.items()}
        try:
            yield (
                client,
                {name: WorkerServiceStub(stack.peer(name, channel)) for name, channel in channels.items()},
            )
        finally:
            for channel in channels.values():
                await channel.close(None)


async def quiet(workers: dict[str, WorkerServiceStub]) -> dict[str, pb.GetLoadResponse]:
    """Wait until no worker holds a block for anyone, and return the loads; fail if that does not come."""
    async with asyncio.timeout(QUIET_SECONDS):
        while True:
            loads = {name: await stub.GetLoad(pb.GetLoadRequest()) for name, stub in workers.items()}
            if not any(load.used_blocks or load.pinned_blocks for load in loads.values()):
                return loads
            await asyncio.sleep(0.02)


class _E2E:
    """The functions above, for tests: test files cannot import each other."""

    make_prompt = staticmethod(make_prompt)
    connected = staticmethod(connected)
    quiet = staticmethod(quiet)


@pytest.fixture(scope="session")
def e2e() -> _E2E:
    """Return prompts, connections and the check that nothing is held."""
    return _E2E()
