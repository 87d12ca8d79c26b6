"""Asks a worker to copy the blocks of a sequence from another worker."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import grpc

from quire.protos import worker_pb2
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from quire.services.router.workers.worker import Worker
from quire.services.server.log import EventLogger

FAILED = "failed"
"""The reported reason if the call itself failed."""

_log = EventLogger("router")


def num_sealed_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many blocks of a generating sequence are full; its last token is not computed yet."""
    return max(0, num_tokens - 1) // block_size


async def copy_blocks(
    source: Worker,
    target: Worker,
    token_ids: Sequence[int],
    scope: worker_pb2.CacheScope,
    *,
    time: worker_pb2.CopyTime,
    seconds: float,
) -> worker_pb2.PullSummary:
    """Copy the full blocks of a sequence that the target lacks; return a summary. Never raises.

    Args:
        token_ids: the prompt and the answer so far.
        time: when the target makes the copy.
        seconds: time limit of the copy, including its wait.
    """
    pull_from = worker_pb2.PullSource(
        address=source.peer_address,
        epoch=source.info.epoch,
        num_blocks=num_sealed_blocks(len(token_ids), target.info.layout.block_size),
        timeout_ms=int(1000 * seconds),
    )
    request = worker_pb2.CopyBlocksRequest(
        sequence_id=f"copy-{secrets.token_hex(8)}",
        token_ids=token_ids,
        cache_scope=scope,
        pull_from=pull_from,
        time=time,
    )
    try:
        with closed_channel_errors():
            response = await target.stub.CopyBlocks(request, timeout=2 * seconds)
    except (grpc.aio.AioRpcError, ChannelClosedError) as error:
        _log.debug("copy_failed", worker=target.worker_id, error=error)
        return worker_pb2.PullSummary(failure=FAILED)
    pulled: worker_pb2.PullSummary = response.pulled
    return pulled
