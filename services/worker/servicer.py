"""Serves ``WorkerService``: forwards the calls of prefill and decode, and answers the shared calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from quire.engine.engine import Engine
from quire.engine.kv_cache.tiers import forget_tail
from quire.protos import worker_pb2, worker_pb2_grpc
from quire.rpc.cluster_proof import description_proof
from quire.services.server.log import set_level
from quire.services.worker.blocks.block_copier import BlockCopier
from quire.services.worker.parts import WorkerParts
from quire.services.worker.reports.metrics import EngineSnapshot, take_snapshot
from quire.services.worker.reports.worker_reports import adapters_to_proto

PrefillCall = Callable[[worker_pb2.PrefillRequest, Any], AsyncGenerator[worker_pb2.PrefillResponse, None]]
DecodeCall = Callable[[worker_pb2.DecodeRequest, Any], AsyncGenerator[worker_pb2.DecodeResponse, None]]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Prefill and decode over one engine.

    Args:
        parts: what both share.
        prefill: computes a prompt and pushes its blocks.
        decode: generates from a prompt whose blocks are pushed here, or computed here.
    """

    Prefill: PrefillCall
    Decode: DecodeCall

    def __init__(self, parts: WorkerParts, prefill: PrefillCall, decode: DecodeCall) -> None:
        self._parts = parts
        self.Prefill = prefill
        self.Decode = decode
        self._copier = BlockCopier(parts.engine, parts.puller)

    def StreamOutputs(
        self, request: worker_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.StreamOutputsResponse, None]:
        """Send the outputs of all decodes that name this stream."""
        return self._parts.outputs.serve(request.stream_id)

    async def CopyBlocks(
        self, request: worker_pb2.CopyBlocksRequest, context: Any
    ) -> worker_pb2.CopyBlocksResponse:
        """Copy a peer's blocks into the cache."""
        root_hash = self._parts.identity.root_hash(request.cache_scope)
        return worker_pb2.CopyBlocksResponse(pulled=await self._copier.copy(request, root_hash))

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """End attempts of requests, wait until they have ended, and return how much they generated."""
        num_generated = await self._parts.requests.abort(request.sequence_ids, request.attempt)
        return worker_pb2.AbortResponse(num_generated_tokens=num_generated)

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe this worker."""
        identity, state = self._parts.identity, self._parts.state
        info = identity.to_proto()
        info.address = self._parts.address()
        info.metrics_port = self._parts.metrics_port()
        info.role = state.role
        if request.nonce and identity.cluster_secret:
            info.proof = description_proof(identity.cluster_secret, request.nonce, info)
        info.is_draining = state.is_draining
        info.is_stalled = state.is_stalled
        info.adapters.extend(adapters_to_proto(state))
        return info

    def WatchWorker(
        self, request: worker_pb2.WatchWorkerRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.WatchWorkerResponse, None]:
        """Report each change of this worker's state and load, until it ends."""
        return self._parts.reports.follow(request.router_id)

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        """Count this worker's requests and blocks."""
        return _load(await self._parts.engine.call(take_snapshot))

    async def SetDraining(
        self, request: worker_pb2.SetDrainingRequest, context: Any
    ) -> worker_pb2.SetDrainingResponse:
        """Change the drain state and report it to the routers. Requests sent before they know are served."""
        self._parts.state.set_draining(request.is_draining)
        return worker_pb2.SetDrainingResponse()

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        """Change the role and report it to the routers. Requests of the old role are served to their end."""
        self._parts.state.change_role(request.role, request.min_seconds_in_role)
        return worker_pb2.SetRoleResponse()

    async def ClearCache(
        self, request: worker_pb2.ClearCacheRequest, context: Any
    ) -> worker_pb2.ClearCacheResponse:
        """Drop the cached blocks that no request uses, in all tiers."""
        return worker_pb2.ClearCacheResponse(num_blocks=await self._parts.engine.call(Engine.clear_cache))

    async def ForgetBlocks(
        self, request: worker_pb2.ForgetBlocksRequest, context: Any
    ) -> worker_pb2.ForgetBlocksResponse:
        """Forget the last blocks of a chain that nothing else uses, in all tiers."""
        chain, num_kept = list(request.block_hashes), request.num_kept
        num_blocks = await self._parts.engine.call(lambda e: forget_tail(e.pool, e.tiers, chain, num_kept))
        return worker_pb2.ForgetBlocksResponse(num_blocks=num_blocks)

    async def SetLogLevel(
        self, request: worker_pb2.SetLogLevelRequest, context: Any
    ) -> worker_pb2.SetLogLevelResponse:
        """Change the least severity of logged events."""
        set_level(request.level)
        return worker_pb2.SetLogLevelResponse()

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Any
    ) -> worker_pb2.LoadAdapterResponse:
        """Load an adapter, or other weights under the name of one."""
        adapter = await self._parts.adapters.load(request.name, request.path)
        return worker_pb2.LoadAdapterResponse(digest=adapter.digest)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Any
    ) -> worker_pb2.UnloadAdapterResponse:
        """Unload an adapter; requests that use it continue with it."""
        self._parts.adapters.unload(request.name)
        return worker_pb2.UnloadAdapterResponse()


def _load(now: EngineSnapshot) -> worker_pb2.GetLoadResponse:
    return worker_pb2.GetLoadResponse(
        num_running=now.num_running,
        num_waiting=now.num_waiting,
        num_transferring=now.num_transferring,
        free_blocks=now.blocks.free,
        cached_blocks=now.blocks.cached,
        used_blocks=now.blocks.used,
        pinned_blocks=now.num_pinned_blocks,
        prefill_backlog_tokens=now.backlog_tokens,
    )
