"""Streams of outputs: what goes at once and what waits, order, errors, and the end of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.engine_thread import EngineFailedError
from quire.engine.sequences.sequence import (
    GeneratedToken,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.errors import Aborted, AlreadyExists, InvalidArgument, ServiceError, Unavailable
from quire.sampling.params import BeamParams, SamplingParams
from quire.services.worker.requests.output_streams import TOKENS_PER_REPORT, OutputStream, OutputStreams
from quire.services.worker.requests.updates import Updates

NEVER = 1e6
"""A rest, in seconds, that no test outlasts."""
Messages = AsyncGenerator[worker_pb2.StreamOutputsResponse, None]


def update(*token_ids: int, index: int = 0, is_last: bool = False, is_scored: bool = False) -> SequenceUpdate:
    sequence = Sequence("r#0", [5], 1, SamplingParams(), b"", index=index)
    status = SequenceStatus.FINISHED_LENGTH if is_last else SequenceStatus.DECODING
    logprobs = TokenLogprobs(-0.5, []) if is_scored else None
    tokens = [GeneratedToken(token_id, logprobs) for token_id in token_ids]
    return SequenceUpdate(sequence, 0, tokens, status)


def queue(*waiting: SequenceUpdate | Exception) -> Updates:
    updates = Updates()
    for each in waiting:
        updates.put(each)
    return updates


def tokens_of(*messages: worker_pb2.StreamOutputsResponse) -> dict[tuple[int, int], list[int]]:
    """Return the tokens of each channel and index, in order."""
    found: dict[tuple[int, int], list[int]] = {}
    for message in messages:
        for channel, token_id in zip(message.channels, message.token_ids, strict=True):
            found.setdefault((channel, 0), []).append(token_id)
        for other in message.others:
            its = found.setdefault((other.channel, other.output.index), [])
            its.extend(token.token_id for token in other.output.tokens)
    return found


@asynccontextmanager
async def opened(stream: OutputStream) -> AsyncIterator[Messages]:
    """Yield the messages of a stream after the first, which is empty."""
    async with aclosing(stream.messages()) as messages:
        assert await anext(messages) == worker_pb2.StreamOutputsResponse()
        yield messages


@pytest.fixture
def resting() -> OutputStream:
    """Return a stream that sends what is urgent, and the first message, and nothing else."""
    stream = OutputStream(NEVER)
    stream._is_resting = True
    return stream


async def test_the_first_and_last_outputs_are_sent_at_once_and_the_others_wait(resting: OutputStream) -> None:
    updates = queue(update(2))
    async with opened(resting) as messages:
        decode = resting.add(7, 1, updates)
        ended = asyncio.create_task(decode.ended())
        assert tokens_of(await anext(messages)) == {(7, 0): [2]}
        reading = asyncio.create_task(anext(messages))
        for token_id in (3, 4):
            updates.put(update(token_id))
            await asyncio.sleep(0)
        assert not reading.done()
        updates.put(update(5, is_last=True))
        last = await reading
        assert tokens_of(last) == {(7, 0): [3, 4, 5]}
        assert [other.output.finish_reason for other in last.others] == [pb.FINISH_REASON_LENGTH]
        await asyncio.sleep(0)
        assert not ended.done(), "gRPC has not taken the last message"
        reading = asyncio.create_task(anext(messages))
        await ended
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_request_waits_for_no_other(resting: OutputStream) -> None:
    updates = queue(update(2))
    async with opened(resting) as messages:
        resting.add(1, 1, updates)
        await anext(messages)
        reading = asyncio.create_task(anext(messages))
        updates.put(update(3))
        resting.add(2, 1, queue(update(9)))
        assert tokens_of(await reading) == {(2, 0): [9]}


async def test_a_stream_without_pauses_sends_each_token_at_once() -> None:
    stream, updates = OutputStream(0.0), queue(update(2))
    async with opened(stream) as messages:
        stream.add(1, 1, updates)
        for token_id in (2, 3, 4):
            assert tokens_of(await anext(messages)) == {(1, 0): [token_id]}
            updates.put(update(token_id + 1))


async def test_waiting_outputs_are_sent_after_the_pause() -> None:
    stream, updates = OutputStream(1e-3), queue(update(2))
    async with opened(stream) as messages:
        stream.add(1, 1, updates)
        await anext(messages)
        updates.put(update(3))
        updates.put(update(4))
        assert tokens_of(await asyncio.wait_for(anext(messages), 20)) == {(1, 0): [3, 4]}


step = st.tuples(st.integers(0, 2), st.lists(st.integers(2, 99), min_size=1, max_size=3), st.booleans())


@given(steps=st.lists(step, max_size=30), read_after=st.sets(st.integers(0, 30)))
def test_each_sequence_keeps_its_order(
    steps: list[tuple[int, list[int], bool]], read_after: set[int]
) -> None:
    async def run() -> None:
        stream, updates = OutputStream(0.0), Updates()
        received: list[worker_pb2.StreamOutputsResponse] = []
        expected: dict[tuple[int, int], list[int]] = {}
        async with opened(stream) as messages:
            stream.add(1, 3, updates)
            for at, (index, token_ids, is_scored) in enumerate(steps):
                updates.put(update(*token_ids, index=index, is_scored=is_scored))
                expected[1, index] = expected.get((1, index), []) + token_ids
                if at in read_after:
                    received.append(await anext(messages))
            updates.put(update(1, index=0, is_last=True))
            expected[1, 0] = [*expected.get((1, 0), []), 1]
            received.append(await anext(messages))
        assert tokens_of(*received) == expected

    asyncio.run(run())


async def test_an_error_is_sent_after_the_earlier_tokens(resting: OutputStream) -> None:
    updates = queue(update(2))
    async with opened(resting) as messages:
        decode = resting.add(1, 1, updates)
        ended = asyncio.create_task(decode.ended())
        await anext(messages)
        updates.put(update(3))
        updates.put(EngineFailedError("CUDA error"))
        assert tokens_of(await anext(messages)) == {(1, 0): [3]}
        await asyncio.sleep(0)
        assert not ended.done()
        reading = asyncio.create_task(anext(messages))
        with pytest.raises(EngineFailedError):
            await ended
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_beam_search_reports_its_count_and_then_all_answers_in_one_message() -> None:
    prompt = Sequence("r#0", [5], 1, SamplingParams(beam=BeamParams(width=4)), b"")
    stream, updates = OutputStream(0.0), Updates()
    async with opened(stream) as messages:
        ended = asyncio.create_task(stream.add(1, 4, updates).ended())
        for num_generated in (TOKENS_PER_REPORT - 1, TOKENS_PER_REPORT, TOKENS_PER_REPORT + 1):
            prompt.tally.num_generated_tokens = num_generated
            updates.put(SequenceUpdate(prompt, 0, [], SequenceStatus.DECODING))
        report = worker_pb2.SequenceOutput(num_generated_tokens=TOKENS_PER_REPORT)
        assert [other.output for other in (await anext(messages)).others] == [report]
        for index in range(2):
            answer = replace(prompt, index=index)
            tokens = [GeneratedToken(7, None)]
            updates.put(SequenceUpdate(answer, 0, tokens, SequenceStatus.FINISHED_STOPPED, score=-1.0))
        outputs = [other.output for other in (await anext(messages)).others]
        assert [output.index for output in outputs] == [0, 1]
        assert {output.num_generated_tokens for output in outputs} == {TOKENS_PER_REPORT + 1}
        reading = asyncio.create_task(anext(messages))
        await asyncio.wait_for(ended, 20)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_stream_that_ends_ends_its_decodes() -> None:
    streams = OutputStreams(NEVER)
    async with aclosing(streams.serve("s")) as messages:
        await anext(messages)
        stream = streams.find("s")
        decodes = [stream.add(channel, 1, queue(update(2))) for channel in range(2)]
        with pytest.raises(AlreadyExists):
            stream.add(1, 1, Updates())
    with pytest.raises(Aborted):
        streams.find("s")
    decodes.append(stream.add(3, 1, Updates()))
    for decode in decodes:
        with pytest.raises(Aborted):
            await asyncio.wait_for(decode.ended(), 20)


async def test_a_failed_decode_keeps_its_error_when_its_stream_ends() -> None:
    stream, updates = OutputStream(NEVER), queue(update(2))
    decode = stream.add(1, 1, updates)
    updates.put(EngineFailedError("CUDA error"))
    stream.end()
    late = stream.add(2, 1, queue(update(2), EngineFailedError("CUDA error")))
    for each in (decode, late):
        with pytest.raises(EngineFailedError):
            await asyncio.wait_for(each.ended(), 20)


async def test_a_worker_that_stops_ends_its_streams_and_opens_no_more() -> None:
    streams = OutputStreams(NEVER)
    async with aclosing(streams.serve("s")) as messages:
        await anext(messages)
        await refused(streams.serve("s"), AlreadyExists)
        streams.close()
        assert await asyncio.wait_for(anext(messages, None), 20) is None
    await refused(streams.serve("t"), Unavailable)


@pytest.mark.parametrize("stream_id", ["", "s" * 65])
async def test_a_stream_has_a_name_of_limited_length(stream_id: str) -> None:
    await refused(OutputStreams(NEVER).serve(stream_id), InvalidArgument)


async def refused(messages: Messages, error: type[ServiceError]) -> None:
    with pytest.raises(error):
        await anext(messages)


async def test_a_cancelled_decode_frees_everything(resting: OutputStream) -> None:
    async with opened(resting) as messages:
        ended = asyncio.create_task(resting.add(1, 1, queue(update(2))).ended())
        await asyncio.sleep(0)
        ended.cancel()
        await asyncio.gather(ended, return_exceptions=True)
        resting.add(1, 1, queue(update(9)))
        assert tokens_of(await anext(messages)) == {(1, 0): [9]}
