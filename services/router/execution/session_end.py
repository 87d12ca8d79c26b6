"""Ends a session: the workers drop the cached blocks that only its next turn could use."""

from __future__ import annotations

import asyncio
from array import array

import grpc.aio

from quire.protos import worker_pb2
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from quire.services.router.execution.cluster import Cluster
from quire.services.router.metrics.turns import LastTurn
from quire.services.router.workers.worker import CALL_SECONDS, Worker
from quire.services.server.log import EventLogger

_log = EventLogger("router")


async def end_session(cluster: Cluster, tenant: str, session: str) -> int:
    """Forget a tenant's session and drop its blocks; return how many blocks the workers dropped.

    The blocks of its first prompt stay, since other sessions may begin with the same. So do blocks that a
    request uses or another chain continues, and those of a worker that does not answer: they are evicted like
    any others.
    """
    last = cluster.metrics.turns.forget(tenant, session)
    if last is None:
        return 0
    # The workers of each revision have blocks with other hashes.
    descriptors = dict.fromkeys(worker.info.cache_descriptor for worker in cluster.workers.all())
    num_blocks = sum([await _end(cluster, last, each) for each in descriptors])
    cluster.metrics.ended_session_blocks.inc(num_blocks)
    return num_blocks


async def _end(cluster: Cluster, last: LastTurn, descriptor: bytes) -> int:
    """Drop the blocks that workers of one cache descriptor have; return how many.

    All of them are asked, since a worker tells the index of its blocks a little later than it has them.
    """
    hashes = await cluster.prefixes.hash_blocks(array("I", last.tokens), last.scope, descriptor)
    num_kept = last.num_first // cluster.model.block_size
    request = worker_pb2.ForgetBlocksRequest(block_hashes=hashes, num_kept=num_kept)
    workers = [each for each in cluster.workers.all() if each.info.cache_descriptor == descriptor]
    return sum(await asyncio.gather(*(_forget(worker, request) for worker in workers)))


async def _forget(worker: Worker, request: worker_pb2.ForgetBlocksRequest) -> int:
    try:
        with closed_channel_errors():
            response = await worker.stub.ForgetBlocks(request, timeout=CALL_SECONDS)
    except (ChannelClosedError, grpc.aio.AioRpcError) as error:
        _log.warning("session_blocks_kept", worker_id=worker.worker_id, error=str(error))
        return 0
    return int(response.num_blocks)
