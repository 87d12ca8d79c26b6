"""The steps of a prompt that prefill and decode have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any, NamedTuple

from quire.engine.sequences.sequence import Sequence
from quire.protos import inference_pb2, worker_pb2
from quire.services.server.phases import Phase, RequestPhases
from quire.services.worker.parts import WorkerParts
from quire.services.worker.requests.convert import converting, logprobs_to_proto
from quire.services.worker.requests.engine_errors import known_errors
from quire.services.worker.requests.updates import Updates


class LocalDecode(NamedTuple):
    """A decode whose prompt has been computed here.

    Attributes:
        accepted: the cached part of the prompt, and the prompt's logprobs.
        updates: the outputs of the sequences, from the first tokens on.
    """

    accepted: worker_pb2.DecodeResponse
    sequence: Sequence
    updates: Updates


@asynccontextmanager
async def decoding_here(
    parts: WorkerParts, request: worker_pb2.DecodeRequest, context: Any
) -> AsyncIterator[LocalDecode]:
    """Compute a prompt and yield the decode that follows, which ends with the context."""
    sequence = await parts.reader.read(request.sequence, stops_after_prefill=False)
    with parts.requests.run("decode", request.sequence, sequence, context) as (updates, phases):
        pulled = await pull_prefix(parts, request, sequence, phases)
        await add_sequence(parts, sequence)
        await updates.begun()
        account_prompt(parts, sequence, pulled, phases)
        # The cached part is known only after the scheduler has admitted the sequence.
        accepted = worker_pb2.Accepted(num_cached_tokens=sequence.num_cached_tokens, pulled=pulled)
        with converting():
            logprobs = await prompt_logprobs(sequence)
        response = worker_pb2.DecodeResponse(accepted=accepted, prompt_logprobs=logprobs)
        yield LocalDecode(response, sequence, updates)


async def pull_prefix(
    parts: WorkerParts,
    request: worker_pb2.PrefillRequest | worker_pb2.DecodeRequest,
    sequence: Sequence,
    phases: RequestPhases,
) -> worker_pb2.PullSummary:
    """Copy blocks from the peer that the request names, if any, and return what arrived."""
    if not request.HasField("pull_from"):
        return worker_pb2.PullSummary()
    start = perf_counter()
    pulled = await parts.puller.pull(sequence, request.pull_from)
    phases.record(Phase.PULL, start, perf_counter())
    return pulled


async def add_sequence(parts: WorkerParts, sequence: Sequence) -> None:
    """Pass a sequence to the engine, which computes its prompt."""
    with known_errors(sequence):
        await parts.engine.call(lambda e: e.add_request(sequence))


def account_prompt(
    parts: WorkerParts, sequence: Sequence, pulled: worker_pb2.PullSummary, phases: RequestPhases
) -> None:
    """Record the metrics of a prompt that was just computed."""
    parts.requests.loads.record_computed(sequence.attempt_id)
    phases.record(Phase.PREFILL_QUEUE, sequence.queued_at, sequence.started_at)
    phases.record(Phase.PREFILL_COMPUTE, sequence.started_at, perf_counter())
    parts.prompts.record_prompt(sequence, pulled.num_blocks * parts.memory.shape.block_size)


async def prompt_logprobs(sequence: Sequence) -> list[inference_pb2.TokenLogprobs]:
    """Return the logprobs of a computed prompt, from a thread: a long prompt would block the event loop."""
    if not sequence.prompt_logprobs:
        return []
    return await asyncio.to_thread(lambda: list(map(logprobs_to_proto, sequence.prompt_logprobs)))
