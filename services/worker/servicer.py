"""Serves the router's calls on one worker."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from quire.engine.engine import Engine, RequestTooLongError
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_memory import KvMemory
from quire.engine.sequence import Sequence, SequenceStatus, SequenceUpdate
from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push import BlockPush, ChannelPool
from quire.protos import kvtransfer_pb2, worker_pb2, worker_pb2_grpc
from quire.services.errors import Aborted, AlreadyExists, InvalidArgument, ServiceError, Unavailable
from quire.services.worker.convert import finish_reason, sequence_from_proto, token_to_proto
from quire.services.worker.decode import Promise, Tickets
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.prefill import PrefillPush
from quire.services.worker.updates import Updates, next_update, next_updates


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Prefill and decode over one engine."""

    def __init__(
        self,
        identity: WorkerIdentity,
        engine: EngineThread,
        memory: KvMemory,
        tickets: Tickets,
        channels: ChannelPool,
        metrics: TransferMetrics,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._memory = memory
        self._tickets = tickets
        self._channels = channels
        self._metrics = metrics
        self._handlers: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)

    # --- prefill ------------------------------------------------------------------------------------------

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        """Compute a prompt, push its blocks, draw its first token."""
        sequence = self._sequence(request.sequence, stops_after_prefill=True)
        with self._running(request.sequence.request_id, sequence) as updates:
            await self._add(sequence)
            if not request.HasField("ticket"):
                yield await self._first_token(sequence, updates)
                return
            push = PrefillPush(sequence, self._memory, self._open_push(request, sequence, context))
            pushing = asyncio.create_task(push.run(request.ticket.first_block))
            pushing.add_done_callback(lambda task: _report_failure(task, updates))
            try:
                first = await self._first_token(sequence, updates, push.computed)
                yield first
                if first.finish_reason:
                    return
                summary = await pushing
                self._metrics.pushed(summary)
                yield worker_pb2.PrefillResponse(
                    pushed=worker_pb2.PushSummary(num_blocks=summary.num_blocks, num_bytes=summary.num_bytes)
                )
            finally:
                pushing.cancel()

    async def _first_token(
        self,
        sequence: Sequence,
        updates: Updates,
        on_update: Callable[[SequenceUpdate], None] = lambda update: None,
    ) -> worker_pb2.PrefillResponse:
        """Follow the prompt's chunks to its first token."""
        while True:
            update = await next_update(updates)
            on_update(update)
            if update.tokens:
                return worker_pb2.PrefillResponse(
                    tokens=map(token_to_proto, update.tokens),
                    num_cached_tokens=sequence.num_cached_tokens,
                    finish_reason=finish_reason(update.status),
                )

    def _open_push(self, request: worker_pb2.PrefillRequest, sequence: Sequence, context: Any) -> BlockPush:
        return BlockPush(
            self._channels.get(request.ticket.address),
            request.ticket,
            request_id=request.sequence.request_id,
            attempt=request.sequence.attempt,
            layout=self._identity.layout,
            num_blocks=-(-sequence.num_tokens // self._memory.shape.block_size),
            timeout=context.time_remaining() or self._identity.request_timeout_seconds,
        )

    # --- decode -------------------------------------------------------------------------------------------

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        """Generate from a prompt whose blocks are pushed here, or computed here."""
        sequence = self._sequence(request.sequence, stops_after_prefill=False)
        with self._running(request.sequence.request_id, sequence) as updates:
            if not request.remote_prefill:
                await self._add(sequence)
                async for response in self._tokens(sequence, updates, is_local=True):
                    yield response
                return
            with _known_errors():
                num_held = await self._engine.call(lambda e: e.accept(sequence))
            promise = self._tickets.issue(sequence, request.sequence.attempt, num_held, updates)
            try:
                yield worker_pb2.DecodeResponse(accepted=self._accepted(promise, sequence))
                async for response in self._tokens(sequence, updates, is_local=False):
                    yield response
            finally:
                self._tickets.close(promise)

    def _accepted(self, promise: Promise, sequence: Sequence) -> worker_pb2.Accepted:
        ticket = kvtransfer_pb2.Ticket(
            ticket_id=promise.ticket_id,
            address=self._tickets.address,
            receiver_epoch=self._tickets.epoch,
            first_block=promise.first_block,
        )
        return worker_pb2.Accepted(ticket=ticket, num_cached_tokens=sequence.num_cached_tokens)

    async def _tokens(
        self, sequence: Sequence, updates: Updates, *, is_local: bool
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        status = SequenceStatus.WAITING
        while not status.is_finished:
            batch = await next_updates(updates)
            status = batch[-1].status
            tokens = [token_to_proto(token) for update in batch for token in update.tokens]
            if not tokens and not status.is_finished:
                continue
            if is_local:
                # What was cached is known only now that the scheduler has admitted the sequence.
                accepted = worker_pb2.Accepted(num_cached_tokens=sequence.num_cached_tokens)
                yield worker_pb2.DecodeResponse(accepted=accepted)
                is_local = False
            yield worker_pb2.DecodeResponse(tokens=tokens, finish_reason=finish_reason(status))

    # --- the rest -----------------------------------------------------------------------------------------

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """End requests and wait until nothing of them is left."""
        tasks = [task for request_id in request.request_ids for task in self._handlers.get(request_id, ())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return worker_pb2.AbortResponse()

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe this worker."""
        return self._identity.to_proto()

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        """Count this worker's requests and blocks."""
        return await self._engine.call(load)

    def _sequence(self, message: worker_pb2.Sequence, *, stops_after_prefill: bool) -> Sequence:
        root_hash = self._identity.root_hash(message.cache_scope)
        vocab_size = self._identity.vocab_size
        return sequence_from_proto(message, root_hash, vocab_size, stops_after_prefill=stops_after_prefill)

    async def _add(self, sequence: Sequence) -> None:
        with _known_errors():
            await self._engine.call(lambda e: e.add(sequence))

    @contextmanager
    def _running(self, request_id: str, sequence: Sequence) -> Iterator[Updates]:
        """Register the handler for ``Abort``; at its end, however it ends, free what the engine holds."""
        name = sequence.request_id
        task = asyncio.current_task()
        assert task is not None
        if self._engine.is_subscribed(name):
            raise AlreadyExists(f"request {name} is already here")
        self._handlers[request_id].add(task)
        try:
            with _known_errors():
                yield self._engine.subscribe(name)
        finally:
            self._engine.unsubscribe(name)
            with suppress(EngineStoppedError):
                self._engine.post(lambda e: e.abort(name))
            self._handlers[request_id].discard(task)
            if not self._handlers[request_id]:
                del self._handlers[request_id]


def load(engine: Engine) -> worker_pb2.GetLoadResponse:
    """Count an engine's requests and blocks; runs in its thread."""
    scheduler, counts = engine.scheduler, engine.pool.counts
    statuses = [s.status for group in engine.groups.values() for s in group.sequences]
    return worker_pb2.GetLoadResponse(
        num_running=sum(len(group.sequences) for group in scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_transferring=statuses.count(SequenceStatus.TRANSFERRING),
        free_blocks=counts.free,
        cached_blocks=counts.cached,
        used_blocks=counts.used,
        pinned_blocks=engine.num_pinned_blocks,
        prefill_backlog_tokens=sum(
            group.num_uncomputed_tokens for group in (*scheduler.running, *scheduler.waiting)
        ),
    )


@contextmanager
def _known_errors() -> Iterator[None]:
    """Turn the engine's and the transfer's errors into statuses."""
    try:
        yield
    except RequestTooLongError as error:
        raise InvalidArgument("token_ids", str(error)) from error
    except EngineStoppedError as error:
        raise Unavailable(str(error), reason="DRAINING") from error
    except PushFailedError as error:
        raise Aborted(f"the push failed: {error}", reason="KV_TRANSFER_FAILED") from error


def _report_failure(task: asyncio.Task[Any], updates: Updates) -> None:
    """Wake the handler that still waits for the engine when its push has failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        known = error if isinstance(error, ServiceError | PushFailedError) else None
        updates.put_nowait(known or Aborted(f"the push failed: {error!r}", reason="KV_TRANSFER_FAILED"))
