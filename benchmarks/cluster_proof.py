"""Measures what the proofs of the cluster secret cost: ``python -m quire.benchmarks.cluster_proof``.

One process serves calls over the loopback without proofs, with the caller's proof, and with the callee's
answer too, in turns. The differences are what both ends spend together.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry

from quire.kvtransfer.proof import Caller, Peer
from quire.protos import kvtransfer_pb2, kvtransfer_pb2_grpc
from quire.services.server.cluster_proof import RequireProof
from quire.services.server.grpc_server import Service, grpc_server

SECRET = bytes(32)
EPOCH = "epoch"
CALLS = 500
ROUNDS = 11


class Lender(kvtransfer_pb2_grpc.KvPullServiceServicer):
    """Has no blocks."""

    async def Pin(self, request: Any, context: Any) -> kvtransfer_pb2.PinResponse:
        """Return nothing."""
        return kvtransfer_pb2.PinResponse()

    async def Renew(self, request: Any, context: Any) -> kvtransfer_pb2.RenewResponse:
        """Return nothing."""
        return kvtransfer_pb2.RenewResponse()


async def measure() -> dict[str, list[float]]:
    """Return the microseconds of a call in each round, by the way it was made."""
    service = Service(
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server, Lender(), "quire.v1.KvPullService"
    )
    async with AsyncExitStack() as stack:

        async def connected(*guards: Any) -> tuple[grpc.aio.Channel, str]:
            server = await stack.enter_async_context(
                grpc_server([service], registry=CollectorRegistry(), interceptors=guards, grace_seconds=0)
            )
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(server.address))
            return channel, server.address

        plain, _ = await connected()
        guarded, address = await connected(RequireProof(SECRET, EPOCH, lambda: address))
        peer = Peer(guarded, Caller(SECRET), address, EPOCH)
        bare, proved = map(kvtransfer_pb2_grpc.KvPullServiceStub, (plain, peer))

        async def answered() -> None:
            call = proved.Pin(kvtransfer_pb2.PinRequest())
            await peer.check(call)
            await call

        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "without": lambda: bare.Renew(kvtransfer_pb2.RenewRequest()),
            "proved": lambda: proved.Renew(kvtransfer_pb2.RenewRequest()),
            "proved and answered": answered,
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, call in ways.items():
                start = time.process_time()
                for _ in range(CALLS):
                    await call()
                found[name].append((time.process_time() - start) / CALLS * 1e6)
        return found


def main() -> None:
    """Print the medians."""
    for name, rounds in asyncio.run(measure()).items():
        print(f"{name:<20} {statistics.median(rounds):4.0f} µs of processor a call, both ends together")


if __name__ == "__main__":
    main()
