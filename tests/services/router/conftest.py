"""Fake workers, and faults of theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from quire.protos import worker_pb2
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from quire.rpc.errors import Aborted, ServiceError
from quire.services.router.workers.output_reader import OutputReader
from quire.tokenization.tokenizer import Tokenizer
from tests.testing.fake_worker import Cluster, Fault, Script


@pytest.fixture
async def cluster(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    """No workers and no router yet; the script says ``hello world, stop here`` and ends itself."""
    answer = [*await tokenizer.encode("hello world, stop here", add_special_tokens=False), 1]
    async with AsyncExitStack() as stack:
        cluster = Cluster(Script(answer), model_folder, stack)
        receive = OutputReader._receive

        def counted(self: OutputReader, message: worker_pb2.StreamOutputsResponse) -> None:
            receive(self, message)
            cluster.num_received[self._stream_id] += 1

        monkeypatch.setattr(OutputReader, "_receive", counted)
        yield cluster


@pytest.fixture
async def pair(cluster: Cluster) -> Cluster:
    """Two prefill and two decode workers."""
    for role, name in (("prefill", "p"), ("decode", "d")):
        for number in (1, 2):
            await cluster.add(f"{name}{number}", role)
    return cluster


@pytest.fixture
async def stub(pair: Cluster) -> GenerationServiceStub:
    """A client of a router of the default settings."""
    return await pair.start()


@pytest.fixture
def fault() -> Callable[..., Fault]:
    """Make a fault; ABORTED where the test does not care."""

    def make(before_token: int, error: ServiceError | None = None) -> Fault:
        return Fault(before_token, error or Aborted("scripted"))

    return make
