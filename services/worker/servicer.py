"""Serves the router's calls on one worker."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NamedTuple

from quire.engine.engine import Engine, KvBudgetError, RequestTooLongError
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_memory import KvMemory
from quire.engine.sequence import Sequence, SequenceUpdate
from quire.engine.structured_output import (
    BadFormatError,
    GrammarCompiler,
    GrammarMatcher,
    StructuredOutputUnavailableError,
)
from quire.kvindex.block_hash import CacheScope
from quire.kvtransfer.channels import ChannelPool
from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push import BlockPush
from quire.protos import inference_pb2, kvtransfer_pb2, worker_pb2, worker_pb2_grpc
from quire.services.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    ServiceError,
    Unavailable,
)
from quire.services.log import set_level
from quire.services.log_level import level_name
from quire.services.phases import Phase, RequestPhases
from quire.services.tracing import Tracer
from quire.services.worker.borrow import PrefixPuller
from quire.services.worker.convert import (
    finish_reason,
    format_from_proto,
    logprobs_to_proto,
    outputs_to_proto,
    sequence_from_proto,
    token_to_proto,
    without_last_token,
)
from quire.services.worker.decode import Promise, Tickets
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.metrics import EngineSnapshot, PromptMetrics, take_snapshot
from quire.services.worker.prefill import PrefillPush, PushedPrompt
from quire.services.worker.updates import Updates, next_update, next_updates
from quire.services.worker.write_back import WriteBacks
from quire.tokenization.errors import MissingTokenizerError


class Running(NamedTuple):
    """A request that is being served here."""

    updates: Updates
    phases: RequestPhases


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
        grammars: GrammarCompiler,
        puller: PrefixPuller,
        announce: Callable[[bool], None],
        prompts: PromptMetrics,
        tracer: Tracer,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._memory = memory
        self._tickets = tickets
        self._channels = channels
        self._metrics = metrics
        self._grammars = grammars
        self._puller = puller
        self._announce = announce
        self._is_set_aside = False
        self._write_backs = WriteBacks(engine, puller)
        self._prompts = prompts
        self._tracer = tracer
        self._handlers: defaultdict[str, dict[asyncio.Task[Any], int]] = defaultdict(dict)
        """The attempt that each task serves, by request."""
        self._aborted: set[asyncio.Task[Any]] = set()
        self._is_draining = False

    # --- prefill ------------------------------------------------------------------------------------------

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.PrefillResponse, None]:
        """Compute a prompt, push its blocks, draw its first token if it is one sequence's."""
        sequence = await self._sequence(request.sequence, stops_after_prefill=True)
        if sequence.params.num_sequences > 1:
            sequence = without_last_token(sequence)
        with self._running("prefill", request.sequence, sequence, context) as (updates, phases):
            pulled = await self._pull(request, sequence, phases)
            # Once it is added the engine may append the first token at any moment.
            num_blocks = -(-sequence.num_tokens // self._memory.shape.block_size)
            await self._add(sequence)
            if not request.HasField("ticket"):
                computed = await self._computed(sequence, updates)
                self._account_prompt(sequence, pulled, phases)
                computed.pulled.CopyFrom(pulled)
                yield computed
                return
            push = PrefillPush(sequence, self._memory, self._open_push(request, num_blocks, context))
            pushing = asyncio.create_task(push.run(request.ticket.first_block))
            pushing.add_done_callback(lambda task: _report_failure(task, updates))
            try:
                first = await self._computed(sequence, updates, push.computed)
                self._account_prompt(sequence, pulled, phases)
                first.pulled.CopyFrom(pulled)
                yield first
                if first.finish_reason:
                    return
                pushed = await pushing
                self._account_push(pushed, phases)
                summary = pushed.summary
                yield worker_pb2.PrefillResponse(
                    pushed=worker_pb2.PushSummary(num_blocks=summary.num_blocks, num_bytes=summary.num_bytes)
                )
            finally:
                pushing.cancel()

    async def _computed(
        self,
        sequence: Sequence,
        updates: Updates,
        on_update: Callable[[SequenceUpdate], None] = lambda update: None,
    ) -> worker_pb2.PrefillResponse:
        """Follow the prompt's chunks to its end, and its first token."""
        while True:
            update = await next_update(updates)
            on_update(update)
            if update.status.is_finished:
                return worker_pb2.PrefillResponse(
                    tokens=map(token_to_proto, update.tokens),
                    num_cached_tokens=sequence.num_cached_tokens,
                    finish_reason=finish_reason(update.status),
                    prompt_logprobs=await _prompt_logprobs(sequence),
                )

    def _account_prompt(
        self, sequence: Sequence, pulled: worker_pb2.PullSummary, phases: RequestPhases
    ) -> None:
        """Observe a prompt that has just been computed."""
        phases.record(Phase.PREFILL_QUEUE, sequence.queued_at, sequence.started_at)
        phases.record(Phase.PREFILL_COMPUTE, sequence.started_at, perf_counter())
        self._prompts.computed(sequence, pulled.num_blocks * self._memory.shape.block_size)

    def _account_push(self, pushed: PushedPrompt, phases: RequestPhases) -> None:
        """Observe a push that was acknowledged; what of it ran beside the computation delayed nothing."""
        self._metrics.pushed(pushed.summary)
        credit_at = pushed.computed_at + pushed.credit_wait_seconds
        phases.record(Phase.CREDIT_WAIT, pushed.computed_at, credit_at)
        phases.record(Phase.TRANSFER, credit_at, pushed.committed_at)
        phases.span.part("push", pushed.committed_at - pushed.summary.seconds, pushed.committed_at)

    def _open_push(self, request: worker_pb2.PrefillRequest, num_blocks: int, context: Any) -> BlockPush:
        return BlockPush(
            self._channels.get(request.ticket.address),
            request.ticket,
            request_id=request.sequence.request_id,
            attempt=request.sequence.attempt,
            layout=self._identity.layout,
            num_blocks=num_blocks,
            timeout=context.time_remaining() or self._identity.request_timeout_seconds,
        )

    # --- decode -------------------------------------------------------------------------------------------

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.DecodeResponse, None]:
        """Generate from a prompt whose blocks are pushed here, or computed here."""
        if request.remote_prefill:
            # The prompt's logits are the prefill worker's; asking for them here would refuse cached blocks.
            request.sequence.ClearField("prompt_logprobs")
        sequence = await self._sequence(request.sequence, stops_after_prefill=False)
        with self._running("decode", request.sequence, sequence, context) as (updates, phases):
            pulled = await self._pull(request, sequence, phases)
            if not request.remote_prefill:
                await self._add(sequence)
                async for response in self._tokens(sequence, updates, is_local=True):
                    if response.HasField("accepted"):
                        self._account_prompt(sequence, pulled, phases)
                        response.accepted.pulled.CopyFrom(pulled)
                    yield response
                return
            with _known_errors(sequence):
                # What comes from this worker's disk need not come from the prefill worker.
                await self._prefetch(sequence)
                first_block = await self._engine.call(lambda e: e.accept(sequence))
            promise = self._tickets.issue(sequence, request.sequence.attempt, first_block, updates)
            try:
                accepted = self._accepted(promise, sequence)
                accepted.pulled.CopyFrom(pulled)
                yield worker_pb2.DecodeResponse(accepted=accepted)
                has_begun = False
                async for response in self._tokens(sequence, updates, is_local=False):
                    if not has_begun:
                        has_begun = True
                        _account_begin(sequence, phases)
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
        return worker_pb2.Accepted(
            ticket=ticket,
            num_cached_tokens=sequence.num_cached_tokens,
            num_held_blocks=len(sequence.held_blocks),
        )

    async def _tokens(
        self, sequence: Sequence, updates: Updates, *, is_local: bool
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        params = sequence.params
        num_left = params.num_sequences
        while num_left:
            batch = await next_updates(updates)
            outputs = outputs_to_proto(batch)
            if not outputs:
                continue
            num_finished = sum(update.status.is_finished for update in batch)
            # A beam search's answers come all at once, and may be fewer than its beams.
            num_left -= num_left if params.beam and num_finished else num_finished
            if is_local:
                # What was cached is known only now that the scheduler has admitted the sequence.
                accepted = worker_pb2.Accepted(num_cached_tokens=sequence.num_cached_tokens)
                yield worker_pb2.DecodeResponse(
                    accepted=accepted, prompt_logprobs=await _prompt_logprobs(sequence)
                )
                is_local = False
            yield worker_pb2.DecodeResponse(outputs=outputs)

    # --- the rest -----------------------------------------------------------------------------------------

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        """End attempts of requests and wait until nothing of them is left."""
        tasks = [
            task
            for request_id in request.request_ids
            for task, attempt in self._handlers.get(request_id, {}).items()
            if attempt <= request.attempt
        ]
        self._aborted.update(tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return worker_pb2.AbortResponse()

    @property
    def is_stopping(self) -> bool:
        """Whether requests are refused because the process is about to end."""
        return self._is_draining

    async def drain(self) -> None:
        """Refuse requests from now on, and wait until those that run have ended."""
        self._is_draining = True
        while tasks := [task for handlers in self._handlers.values() for task in handlers]:
            await asyncio.wait(tasks)

    async def WriteBack(
        self, request: worker_pb2.WriteBackRequest, context: Any
    ) -> worker_pb2.WriteBackResponse:
        """Copy a peer's blocks in idle time."""
        scope = CacheScope(request.cache_scope.tenant, request.cache_scope.salt)
        root_hash = self._identity.root_hash(scope)
        return worker_pb2.WriteBackResponse(pulled=await self._write_backs.copy(request, root_hash))

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_pb2.GetWorkerInfoResponse:
        """Describe this worker."""
        info = self._identity.to_proto()
        info.is_draining = self._is_set_aside or self._is_draining
        return info

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        """Count this worker's requests and blocks."""
        return _load(await self._engine.call(take_snapshot))

    async def SetDraining(
        self, request: worker_pb2.SetDrainingRequest, context: Any
    ) -> worker_pb2.SetDrainingResponse:
        """Tell the routers; what they still send until they know is served."""
        if request.is_draining != self._is_set_aside:
            self._is_set_aside = request.is_draining
            self._announce(request.is_draining)
        return worker_pb2.SetDrainingResponse()

    async def ClearCache(
        self, request: worker_pb2.ClearCacheRequest, context: Any
    ) -> worker_pb2.ClearCacheResponse:
        """Forget what no request uses, in all tiers."""
        return worker_pb2.ClearCacheResponse(num_blocks=await self._engine.call(Engine.clear_cache))

    async def SetLogLevel(
        self, request: worker_pb2.SetLogLevelRequest, context: Any
    ) -> worker_pb2.SetLogLevelResponse:
        """Log more, or less."""
        set_level(level_name(request.level))
        return worker_pb2.SetLogLevelResponse()

    async def _sequence(self, message: worker_pb2.Sequence, *, stops_after_prefill: bool) -> Sequence:
        return sequence_from_proto(
            message,
            self._identity.root_hash(CacheScope(message.cache_scope.tenant, message.cache_scope.salt)),
            self._identity.vocab_size,
            await self._grammar(message),
            stops_after_prefill=stops_after_prefill,
        )

    async def _grammar(self, message: worker_pb2.Sequence) -> GrammarMatcher | None:
        output_format = format_from_proto(message.format)
        if output_format is None:
            return None
        num_prompt_tokens = len(message.token_ids) - message.num_output_tokens
        try:
            return await asyncio.to_thread(self._grammars.compile, output_format, num_prompt_tokens)
        except BadFormatError as error:
            raise InvalidArgument(f"format.{output_format.kind}", str(error)) from error
        except (StructuredOutputUnavailableError, MissingTokenizerError) as error:
            raise FailedPrecondition(str(error), reason="NO_STRUCTURED_OUTPUT") from error

    async def _pull(
        self,
        request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest,
        sequence: Sequence,
        phases: RequestPhases,
    ) -> worker_pb2.PullSummary:
        if not request.HasField("pull_from"):
            return worker_pb2.PullSummary()
        start = perf_counter()
        pulled = await self._puller.pull(sequence, request.pull_from)
        phases.record(Phase.PULL, start, perf_counter())
        return pulled

    async def _prefetch(self, sequence: Sequence) -> None:
        """Return when what the disk has of the prompt is in host memory, as far as there is room."""

        def prefetch(engine: Engine, done: Callable[[None], None]) -> None:
            engine.prefetch(engine.tables.prefix_hashes(sequence), lambda: done(None))

        await self._engine.call_back(prefetch)

    async def _add(self, sequence: Sequence) -> None:
        with _known_errors(sequence):
            await self._engine.call(lambda e: e.add(sequence))

    @contextmanager
    def _running(
        self, role: str, message: worker_pb2.Sequence, sequence: Sequence, context: Any
    ) -> Iterator[Running]:
        """Register the handler for ``Abort``; at its end, however it ends, free what the engine holds."""
        name, request_id = sequence.request_id, message.request_id
        task = asyncio.current_task()
        assert task is not None
        if self._is_draining:
            raise Unavailable("this worker is stopping; send requests to another", reason="DRAINING")
        if self._engine.is_subscribed(name):
            raise AlreadyExists(f"request {name} is already here")
        self._handlers[request_id][task] = message.attempt
        try:
            with self._tracer.span(role, context.invocation_metadata()) as span, _known_errors(sequence):
                span.set(quire__sequence_id=name, quire__attempt=message.attempt)
                yield Running(self._engine.subscribe(name), RequestPhases(self._prompts.phases, span))
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise
            # gRPC sends no status for a cancelled handler: who still reads the stream would wait for ever.
            task.uncancel()
            raise Aborted(f"request {request_id} was aborted") from None
        finally:
            self._aborted.discard(task)
            self._engine.unsubscribe(name)
            with suppress(EngineStoppedError):
                self._engine.post(lambda e: e.abort(name))
            del self._handlers[request_id][task]
            if not self._handlers[request_id]:
                del self._handlers[request_id]


async def _prompt_logprobs(sequence: Sequence) -> list[inference_pb2.TokenLogprobs]:
    """Return the logprobs of a computed prompt; those of a long one take too long for the event loop."""
    if not sequence.prompt_logprobs:
        return []
    return await asyncio.to_thread(lambda: list(map(logprobs_to_proto, sequence.prompt_logprobs)))


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


@contextmanager
def _known_errors(sequence: Sequence) -> Iterator[None]:
    """Turn the engine's and the transfer's errors into statuses."""
    try:
        yield
    except KvBudgetError as error:
        raise InvalidArgument("sampling.kv_budget_tokens", str(error)) from error
    except RequestTooLongError as error:
        raise InvalidArgument(_field_of_size(sequence), str(error)) from error
    except EngineStoppedError as error:
        raise Unavailable(str(error), reason="ENGINE_STOPPED") from error
    except PushFailedError as error:
        raise Aborted(f"the push failed: {error}", reason="KV_TRANSFER_FAILED") from error


def _account_begin(sequence: Sequence, phases: RequestPhases) -> None:
    """Observe the first tokens of a prompt that was computed elsewhere, unless they ended it."""
    if sequence.started_at:
        phases.record(Phase.DECODE_QUEUE, sequence.queued_at, sequence.started_at)
        phases.record(Phase.FIRST_DECODE_STEP, sequence.started_at, perf_counter())


def _field_of_size(sequence: Sequence) -> str:
    """Return which field makes a request too large: several sequences, or a long prompt."""
    if sequence.params.num_sequences == 1:
        return "token_ids"
    return "sampling.beam.width" if sequence.params.beam else "sampling.n"


def _report_failure(task: asyncio.Task[Any], updates: Updates) -> None:
    """Wake the handler that still waits for the engine when its push has failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        known = error if isinstance(error, ServiceError | PushFailedError) else None
        updates.put_nowait(known or Aborted(f"the push failed: {error!r}", reason="KV_TRANSFER_FAILED"))
