"""Calls on a channel that is closed: one error, which is told from a cancelled request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from quire.protos import worker_pb2, worker_pb2_grpc
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from tests.testing.grpc_servers import asyncio_server


class Silent(worker_pb2_grpc.WorkerServiceServicer):
    """Takes calls and never answers."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def GetLoad(self, request: Any, context: Any) -> None:
        self.begun.set()
        await asyncio.Event().wait()


class Setup:
    """A channel to a server that never answers."""

    def __init__(self, servicer: Silent, address: str) -> None:
        self.servicer, self.channel = servicer, grpc.aio.insecure_channel(address)
        # A stub of a channel that is closed already may abort the process: it registers its methods there.
        self._stub: Any = worker_pb2_grpc.WorkerServiceStub(self.channel)

    async def call(self) -> None:
        with closed_channel_errors():
            await self._stub.GetLoad(worker_pb2.GetLoadRequest())


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    servicer = Silent()
    async with asyncio_server((worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)) as address:
        running = Setup(servicer, address)
        yield running
        await running.channel.close(None)


async def test_a_channel_that_was_closed_before_the_call(setup: Setup) -> None:
    await setup.channel.close(None)
    with pytest.raises(ChannelClosedError):
        await setup.call()


async def test_a_channel_that_is_closed_during_the_call(setup: Setup) -> None:
    calling = asyncio.create_task(setup.call())
    await asyncio.wait_for(setup.servicer.begun.wait(), 5)
    await setup.channel.close(None)
    with pytest.raises(ChannelClosedError):
        await calling
    assert not calling.cancelled()


async def test_a_request_that_is_cancelled_stays_cancelled(setup: Setup) -> None:
    calling = asyncio.create_task(setup.call())
    await asyncio.wait_for(setup.servicer.begun.wait(), 5)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert calling.cancelled()
