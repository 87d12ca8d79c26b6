"""Serves the call of the decode service: promise to take a prompt's blocks, then generate from them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from time import perf_counter
from typing import Any

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence, SequenceStatus, SequenceUpdate
from quire.protos import kvtransfer_pb2, worker_pb2
from quire.services.decode.tickets import Promise, Tickets
from quire.services.server.phases import Phase, RequestPhases
from quire.services.worker.convert import converting, outputs_to_proto
from quire.services.worker.engine_errors import known_errors
from quire.services.worker.parts import WorkerParts
from quire.services.worker.prompt_steps import account_prompt, add_sequence, prompt_logprobs, pull_prefix
from quire.services.worker.updates import Updates

TOKENS_PER_REPORT = 64
"""Number of tokens after which a beam search, which has no outputs yet, reports how many it has generated."""


class DecodeCalls:
    """The life of an answer on the worker that generates it."""

    def __init__(self, parts: WorkerParts, tickets: Tickets) -> None:
        self._parts = parts
        self._tickets = tickets

    def stream_outputs(
        self, request: worker_pb2.StreamOutputsRequest
    ) -> AsyncGenerator[worker_pb2.StreamOutputsResponse, None]:
        """Send the outputs of all decodes that name this stream."""
        return self._parts.outputs.serve(request.stream_id)

    async def decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.DecodeResponse, None]:
        """Generate from a prompt whose blocks are pushed here, or computed here."""
        parts = self._parts
        if request.remote_prefill:
            # The prompt's logits are the prefill worker's; asking for them here would refuse cached blocks.
            request.sequence.ClearField("prompt_logprobs")
        sequence = await parts.reader.read(request.sequence, stops_after_prefill=False)
        with parts.requests.run(
            "decode",
            request.sequence,
            sequence,
            context,
            computes_prompt=not request.remote_prefill,
        ) as (updates, phases):
            pulled = await pull_prefix(parts, request, sequence, phases)
            if not request.remote_prefill:
                await add_sequence(parts, sequence)
                first = await _first_updates(updates)
                account_prompt(parts, sequence, pulled, phases)
                # What was cached is known only now that the scheduler has admitted the sequence.
                accepted = worker_pb2.Accepted(num_cached_tokens=sequence.num_cached_tokens, pulled=pulled)
                with converting():
                    logprobs = await prompt_logprobs(sequence)
                yield worker_pb2.DecodeResponse(accepted=accepted, prompt_logprobs=logprobs)
                async for response in self._outputs(request, sequence, first, updates):
                    yield response
                return
            with known_errors(sequence):
                # What comes from this worker's disk need not come from the prefill worker.
                await self._prefetch(sequence)
                first_block = await parts.engine.call(lambda e: e.transfers.accept(sequence))
            promise = self._tickets.issue(sequence, request.sequence.attempt, first_block, updates)
            try:
                accepted = self._accepted(promise)
                accepted.pulled.CopyFrom(pulled)
                yield worker_pb2.DecodeResponse(accepted=accepted)
                first = await _first_updates(updates)
                _account_begin(sequence, phases)
                async for response in self._outputs(request, sequence, first, updates):
                    yield response
            finally:
                self._tickets.close(promise)

    async def _outputs(
        self,
        request: worker_pb2.DecodeRequest,
        sequence: Sequence,
        first: list[SequenceUpdate],
        updates: Updates,
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        """Send the outputs into the stream that the request names, or yield them if there is none."""
        params = sequence.params
        stream = self._parts.outputs.find(request.output_channel.stream_id)
        if stream is not None and params.beam is None:
            decode = stream.carry(request.output_channel.channel, params.num_sequences, first, updates)
            await decode.ended()
            return
        num_left, batch, num_reported = params.num_sequences, first, 0
        while True:
            with converting():
                outputs = outputs_to_proto(batch)
            num_generated = sequence.tally.num_generated_tokens
            if outputs or num_generated - num_reported >= TOKENS_PER_REPORT:
                num_reported = num_generated
                yield worker_pb2.DecodeResponse(outputs=outputs, num_generated_tokens=num_generated)
            num_finished = sum(update.status.is_finished for update in batch)
            # A beam search's answers come all at once, and may be fewer than its beams.
            num_left -= num_left if params.beam and num_finished else num_finished
            if not num_left:
                return
            batch = await updates.next_batch()

    def _accepted(self, promise: Promise) -> worker_pb2.Accepted:
        ticket = kvtransfer_pb2.Ticket(
            ticket_id=promise.ticket_id,
            address=self._parts.address(),
            receiver_epoch=self._tickets.epoch,
            first_block=promise.first_block,
        )
        return worker_pb2.Accepted(
            ticket=ticket,
            num_cached_tokens=promise.sequence.num_cached_tokens,
            num_held_blocks=len(promise.sequence.held_blocks),
        )

    async def _prefetch(self, sequence: Sequence) -> None:
        """Return when what the disk has of the prompt is in host memory, as far as there is room."""

        def prefetch(engine: Engine, done: Callable[[None], None]) -> None:
            engine.prefetch(engine.tables.prefix_hashes(sequence), lambda: done(None))

        await self._parts.engine.call_back(prefetch)


async def _first_updates(updates: Updates) -> list[SequenceUpdate]:
    """Return the updates up to the first ones after the prompt: with tokens, of beams, or with the end."""
    first: list[SequenceUpdate] = []
    while not any(update.status >= SequenceStatus.DECODING for update in first):
        first += await updates.next_batch()
    return first


def _account_begin(sequence: Sequence, phases: RequestPhases) -> None:
    """Observe the first tokens of a prompt that was computed elsewhere, unless they ended it."""
    if sequence.started_at:
        phases.record(Phase.DECODE_QUEUE, sequence.queued_at, sequence.started_at)
        phases.record(Phase.FIRST_DECODE_STEP, sequence.started_at, perf_counter())
