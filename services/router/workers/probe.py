"""Asks a worker for its health and its description."""

from __future__ import annotations

from typing import NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from quire.protos import worker_pb2
from quire.rpc.channels import closed_channel_errors
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.proof import new_challenge
from quire.services.router.workers.worker import WorkerConnection


class StrangerError(Exception):
    """Another process now answers at the address of a worker that had joined."""


class Probe(NamedTuple):
    """A worker's answer.

    Attributes:
        is_ready: whether it can serve now; not so, for example, while its engine is stalled.
        nonce: what the worker's proof answers.
    """

    info: worker_pb2.GetWorkerInfoResponse
    is_ready: bool
    nonce: str

    @property
    def is_stopping(self) -> bool:
        """Whether its process is about to end; a worker that an operator drains stays ready."""
        return self.info.is_draining and not self.is_ready


async def probe_worker(connection: WorkerConnection, trust: ClusterTrust, seconds: float) -> Probe:
    """Return the worker's health and description.

    Args:
        trust: checks the proof of a worker that had proved its identity before.
        seconds: time for each of the two calls.

    Raises:
        AioRpcError: there is no answer, or none within the time.
        ChannelClosedError: this process closed the connection.
        StrangerError: the worker had proved its identity, and now another process answered.
    """
    try:
        return await _probe_once(connection, trust, seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
    # A connection that was lost while idle fails one call with UNAVAILABLE; then gRPC connects again.
    return await _probe_once(connection, trust, seconds)


async def _probe_once(connection: WorkerConnection, trust: ClusterTrust, seconds: float) -> Probe:
    nonce = new_challenge()
    request = worker_pb2.GetWorkerInfoRequest(nonce=nonce)
    with closed_channel_errors():
        health = await connection.health.Check(health_pb2.HealthCheckRequest(), timeout=seconds)
        info = await connection.stub.GetWorkerInfo(request, timeout=seconds)
    if connection.peer is not None and not trust.is_proven(nonce, info):
        raise StrangerError
    return Probe(info, health.status == health_pb2.HealthCheckResponse.SERVING, nonce)
