"""Serves the call of the decode service: promises blocks for a prompt, then generates from them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Any

from quire.engine.sequences.sequence import Sequence
from quire.protos import kvtransfer_pb2, worker_pb2
from quire.services.decode.tickets import Promise, Tickets
from quire.services.server.phases import Phase, RequestPhases
from quire.services.worker.parts import WorkerParts
from quire.services.worker.prompt_steps import decoding_here


class DecodeCalls:
    """The life of an answer on the worker that generates it."""

    def __init__(self, parts: WorkerParts, tickets: Tickets) -> None:
        self._parts = parts
        self._tickets = tickets

    async def decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.DecodeResponse, None]:
        """Generate from a prompt whose blocks are pushed to this worker, or computed here.

        Raises:
            Aborted: the stream that the request names is not open.
        """
        parts, channel = self._parts, request.output_channel.channel
        stream = parts.outputs.find(request.output_channel.stream_id)
        if not request.remote_prefill:
            async with decoding_here(parts, request, context) as (accepted, sequence, updates):
                yield accepted
                await stream.add(channel, sequence.params.num_sequences, updates).ended()
            return
        # The prefill worker has the prompt's logits. A request for them here would refuse cached blocks.
        request.sequence.ClearField("prompt_logprobs")
        sequence = await parts.reader.read(request.sequence, stops_after_prefill=False)
        with parts.requests.run("decode", request.sequence, sequence, context, computes_prompt=False) as (
            updates,
            phases,
        ):
            parts.engine.check(sequence)
            promise = self._tickets.issue(sequence, request.sequence.attempt, updates)
            try:
                # The engine accepts only between two steps. Meanwhile the prefill worker computes.
                yield worker_pb2.DecodeResponse(accepted=worker_pb2.Accepted(ticket=self._ticket(promise)))
                # Blocks on this worker's disk need not be pushed by the prefill worker.
                first_block = await parts.engine.call_when_read(
                    lambda engine: engine.tables.prefix_hashes(sequence),
                    lambda engine: engine.transfers.accept(sequence),
                )
                promise.accept(first_block)
                await updates.begun()
                _account_begin(sequence, phases)
                await stream.add(channel, sequence.params.num_sequences, updates).ended()
            finally:
                self._tickets.close(promise)

    def _ticket(self, promise: Promise) -> kvtransfer_pb2.Ticket:
        return kvtransfer_pb2.Ticket(
            ticket_id=promise.ticket_id,
            address=self._parts.address(),
            receiver_epoch=self._tickets.epoch,
        )


def _account_begin(sequence: Sequence, phases: RequestPhases) -> None:
    """Observe the first tokens of a prompt that another worker computed, unless they ended the request."""
    if sequence.started_at:
        phases.record(Phase.DECODE_QUEUE, sequence.queued_at, sequence.started_at)
        phases.record(Phase.FIRST_DECODE_STEP, sequence.started_at, perf_counter())
