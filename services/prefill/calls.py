"""Serves the call of the prefill service: compute a prompt and push its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from quire.engine.sequences.pooling import PooledPrompt
from quire.engine.sequences.sequence import NO_BLOCK, Sequence, SequenceUpdate
from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.models.embeddings import Pooling
from quire.protos import worker_pb2
from quire.rpc.errors import Aborted, ServiceError
from quire.services.prefill.push import PrefillPush, PushedPrompt
from quire.services.server.log import EventLogger
from quire.services.server.phases import Phase, RequestPhases
from quire.services.worker.parts import WorkerParts
from quire.services.worker.prompt_steps import account_prompt, add_sequence, prompt_logprobs, pull_prefix
from quire.services.worker.requests.convert import (
    converting,
    finish_reason,
    token_to_proto,
    without_last_token,
)
from quire.services.worker.requests.updates import Updates

_log = EventLogger("worker")


class PrefillCalls:
    """The life of a prompt on the worker that computes it."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    async def prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.PrefillResponse, None]:
        """Compute a prompt, push its blocks, and sample the first token if there is only one sequence."""
        parts = self._parts
        sequence = await parts.reader.read(request.sequence, stops_after_prefill=True)
        if request.HasField("embedding_dimensions"):
            _pool(sequence, parts.identity.embedding, request.embedding_dimensions)
        if sequence.params.num_sequences > 1:
            sequence = without_last_token(sequence)
        with parts.requests.run("prefill", request.sequence, sequence, context) as (updates, phases):
            pulled = await pull_prefix(parts, request, sequence, phases)
            # After the sequence was added, the engine may append the first token at any moment.
            num_blocks = -(-sequence.num_tokens // parts.memory.shape.block_size)
            num_bare = parts.memory.shape.first_seen_block(sequence.num_tokens)
            await add_sequence(parts, sequence)
            if not request.HasField("ticket"):
                computed = await _computed(sequence, updates)
                account_prompt(parts, sequence, pulled, phases)
                computed.pulled.CopyFrom(pulled)
                yield computed
                return
            opened = self._open_push(request, num_blocks, context)
            push = PrefillPush(sequence, parts.blocks, opened, num_bare)
            pushing = asyncio.create_task(self._pushed(push, sequence))
            pushing.add_done_callback(lambda task: _report_failure(task, updates))
            try:
                first = await _computed(sequence, updates, push.record_progress)
                account_prompt(parts, sequence, pulled, phases)
                first.pulled.CopyFrom(pulled)
                yield first
                if first.finish_reason:
                    return
                pushed = await pushing
                self._account_push(pushed, phases)
                summary = pushed.summary
                yield worker_pb2.PrefillResponse(
                    pushed=worker_pb2.PushSummary(
                        num_blocks=summary.num_blocks,
                        num_bytes=summary.num_bytes,
                        num_held_blocks=summary.num_held_blocks,
                    )
                )
            finally:
                pushing.cancel()

    async def _pushed(self, push: PrefillPush, sequence: Sequence) -> PushedPrompt:
        """Push the prompt. If a block arrives damaged, forget those that are damaged in this worker's memory.

        The next attempt then computes them again.
        """
        try:
            return await push.run()
        except PushFailedError as error:
            if error.status is grpc.StatusCode.DATA_LOSS:
                await self._forget_damaged(sequence)
            raise

    async def _forget_damaged(self, sequence: Sequence) -> None:
        full = zip(sequence.block_table, sequence.block_hashes, strict=False)
        blocks = [(block_id, block_hash) for block_id, block_hash in full if block_id != NO_BLOCK]
        damaged = await asyncio.to_thread(self._parts.blocks.damaged, blocks)
        if damaged:
            _log.error("blocks_damaged_in_memory", sequence_id=sequence.attempt_id, blocks=len(damaged))
            await self._parts.engine.call(lambda e: e.pool.forget(damaged))

    def _open_push(self, request: worker_pb2.PrefillRequest, num_blocks: int, context: Any) -> BlockPush:
        identity = self._parts.identity
        return BlockPush(
            self._parts.channels,
            request.ticket,
            attempt=request.sequence.attempt,
            blocks=PromptBlocks(identity.layout, num_blocks),
            # Without a deadline, the push ends with the call at the latest.
            timeout=context.time_remaining(),
            transports=self._parts.transports,
        )

    def _account_push(self, pushed: PushedPrompt, phases: RequestPhases) -> None:
        """Observe the time of an acknowledged push after the computation; before, it caused no delay."""
        self._parts.transfers.record_push(pushed.summary)
        credit_at = pushed.computed_at + pushed.credit_wait_seconds
        phases.record(Phase.CREDIT_WAIT, pushed.computed_at, credit_at)
        phases.record(Phase.TRANSFER, credit_at, pushed.committed_at)
        phases.span.part("push", pushed.committed_at - pushed.summary.seconds, pushed.committed_at)


async def _computed(
    sequence: Sequence,
    updates: Updates,
    on_update: Callable[[SequenceUpdate], None] = lambda update: None,
) -> worker_pb2.PrefillResponse:
    """Follow the chunks of the prompt until it is computed; return the response with its first token."""
    while True:
        update = await updates.next()
        on_update(update)
        if update.status.is_finished:
            with converting():
                return worker_pb2.PrefillResponse(
                    tokens=map(token_to_proto, update.tokens),
                    num_cached_tokens=sequence.num_cached_tokens,
                    num_generated_tokens=sequence.tally.num_generated_tokens,
                    finish_reason=finish_reason(update.status),
                    prompt_logprobs=await prompt_logprobs(sequence),
                    embedding=sequence.pooled.embedding() if sequence.pooled is not None else (),
                )


def _pool(sequence: Sequence, model: worker_pb2.EmbeddingModel, dimensions: int) -> None:
    """Let a sequence compute an embedding: no token is sampled, and nothing reads its blocks."""
    size, kind = dimensions or model.size, Pooling(model.pooling)
    sequence.pooled = PooledPrompt.of(kind, sequence.num_tokens, size, normalizes=model.normalizes)
    sequence.samples_tokens = sequence.stops_after_prefill = False


def _report_failure(task: asyncio.Task[Any], updates: Updates) -> None:
    """If the push has failed, wake the handler, which may still wait for the engine."""
    if not task.cancelled() and (error := task.exception()) is not None:
        known = error if isinstance(error, ServiceError | PushFailedError) else None
        updates.put(known or Aborted(f"the push failed: {error!r}", reason="KV_TRANSFER_FAILED"))
