"""The queue between the engine and a request: batches for a slow reader, and errors in their place."""

from __future__ import annotations

import asyncio

import pytest

from quire.engine.engine_thread import EngineFailedError
from quire.engine.errors import RequestFailedError
from quire.engine.sequences.sequence import Sequence, SequenceStatus, SequenceUpdate
from quire.sampling.params import SamplingParams
from quire.services.worker.requests.updates import MAX_BATCH, Updates

SEQUENCE = Sequence("r#0", [5], 1, SamplingParams(), b"")


def update(number: int, error: RequestFailedError | None = None) -> SequenceUpdate:
    return SequenceUpdate(SEQUENCE, number, [], SequenceStatus.DECODING, error=error)


def queue(*items: SequenceUpdate | Exception) -> Updates:
    updates = Updates()
    for item in items:
        updates.put(item)
    return updates


async def test_a_slow_reader_gets_several_steps_at_once_and_none_is_lost() -> None:
    updates = queue(*map(update, range(2 * MAX_BATCH + 3)))
    batches = [await updates.next_batch() for _ in range(3)]
    assert [len(batch) for batch in batches] == [MAX_BATCH, MAX_BATCH, 3]
    numbers = [each.num_computed_tokens for batch in batches for each in batch]
    assert numbers == list(range(2 * MAX_BATCH + 3))


async def test_the_first_update_is_awaited_and_remains_in_the_queue() -> None:
    prompt = SequenceUpdate(SEQUENCE, 0, [], SequenceStatus.PREFILLING)
    updates = queue(prompt)
    waiting = asyncio.create_task(updates.begun())
    await asyncio.sleep(0)
    assert not waiting.done()
    for number in (1, 2):
        updates.put(update(number))
    await waiting
    assert [each.num_computed_tokens for each in await updates.next_batch()] == [1, 2]


async def test_a_fast_reader_waits_for_one() -> None:
    updates = queue()
    reading = asyncio.create_task(updates.next_batch())
    await asyncio.sleep(0)
    assert not reading.done()
    updates.put(update(7))
    assert [each.num_computed_tokens for each in await reading] == [7]


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (EngineFailedError("CUDA error"), EngineFailedError),
        (update(1, RequestFailedError("not a number")), RequestFailedError),
    ],
)
async def test_an_error_ends_the_request(last: SequenceUpdate | Exception, kind: type[Exception]) -> None:
    updates = queue(update(0), last)
    assert (await updates.next()).num_computed_tokens == 0
    with pytest.raises(kind):
        await updates.next()
    with pytest.raises(kind):
        await queue(update(0), last).next_batch()


async def test_waiting_updates_are_passed_on_before_later_ones() -> None:
    updates = queue(update(0), update(1))
    taken: list[SequenceUpdate | Exception] = []
    updates.forward_to(taken.append)
    updates.put(update(2))
    failure = EngineFailedError("CUDA error")
    updates.put(failure)
    *numbered, last = taken
    assert [each.num_computed_tokens for each in numbered if isinstance(each, SequenceUpdate)] == [0, 1, 2]
    assert last is failure
