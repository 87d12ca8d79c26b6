"""The server of pushes: every end that is not a commit aborts, is counted once and is told to the sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import BadBlockError, TransferError, UnknownTicketError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push_receiver import KvTransferServicer, Reservation
from quire.protos import kvtransfer_pb2 as pb

LAYOUT = KvLayout(1, 1, 4, 8, "float16", "model", "float16", "float32-1")
NUM_BLOCKS = 3
WINDOW = 2


class Sink:
    """A sink that keeps what happens, and fails where the test says."""

    layout = LAYOUT
    epoch = "epoch"
    first_block = 0
    num_held_blocks = 0

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.failures: dict[str, Exception] = {}

    async def open(self, request: pb.PushOpen) -> Reservation:
        self._happened("open")
        return self

    def write(self, frame: Frame) -> None:
        self._happened(frame.index)

    async def commit(self, first_token_id: int | None) -> None:
        self._happened("commit")
        self.events.append(first_token_id)

    def abort(self, reason: str) -> None:
        self.events.append(f"abort: {reason}")

    def _happened(self, event: str | int) -> None:
        if error := self.failures.get(str(event)):
            raise error
        self.events.append(event)


class Aborted(Exception):
    """What gRPC raises in a handler that aborts its call."""


class Context:
    """Keeps the status of the call."""

    def __init__(self) -> None:
        self.status: tuple[grpc.StatusCode, str] | None = None

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self.status = (code, details)
        raise Aborted


def opening(**changes: Any) -> pb.PushRequest:
    fields: dict[str, Any] = {
        "receiver_epoch": "epoch",
        "layout": layout_to_proto(LAYOUT),
        "num_blocks": NUM_BLOCKS,
    }
    return pb.PushRequest(open=pb.PushOpen(**fields | changes))


def block(index: int, payload: bytes = bytes(LAYOUT.block_bytes)) -> pb.PushRequest:
    return frames.to_proto([Frame(index, b"", payload)])


def commit(**fields: int) -> pb.PushRequest:
    return pb.PushRequest(commit=pb.PushCommit(**fields))


WHOLE = [opening(), *map(block, range(NUM_BLOCKS)), commit(first_token_id=0)]


class Setup:
    """A servicer, and what it did."""

    def __init__(self) -> None:
        self.sink, self.context, self.registry = Sink(), Context(), CollectorRegistry()
        window_bytes = WINDOW * LAYOUT.block_bytes
        self.servicer = KvTransferServicer(
            self.sink, TransferMetrics(self.registry), window_bytes=window_bytes
        )
        self.responses: list[pb.PushResponse] = []

    async def push(self, messages: Sequence[pb.PushRequest]) -> None:
        async def requests() -> AsyncIterator[pb.PushRequest]:
            for message in messages:
                yield message

        async for response in self.call(requests()):
            self.responses.append(response)

    def call(self, requests: AsyncIterator[pb.PushRequest]) -> AsyncGenerator[pb.PushResponse, None]:
        context: Any = self.context
        calling: Any = self.servicer.Push(requests, context)
        responses: AsyncGenerator[pb.PushResponse, None] = calling
        return responses

    def failures(self) -> dict[str, float]:
        """Return the failures that were counted, by reason."""
        return {
            sample.labels["reason"]: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "quire_kv_transfer_failures_total" and sample.value
        }


@pytest.fixture
def setup() -> Setup:
    return Setup()


async def test_a_whole_push_is_written_in_order_and_committed_once(setup: Setup) -> None:
    await setup.push(WHOLE)
    assert setup.sink.events == ["open", 0, 1, 2, "commit", 0]
    *credits, last = setup.responses
    assert sum(each.credit.num_blocks for each in credits) == NUM_BLOCKS
    assert last.HasField("committed")
    assert setup.failures() == {}


async def test_a_block_that_is_repeated_changes_nothing(setup: Setup) -> None:
    other_bytes = b"\x01" * LAYOUT.block_bytes
    await setup.push([opening(), block(0), block(0, other_bytes), *WHOLE[2:]])
    assert setup.sink.events == ["open", 0, 1, 2, "commit", 0]


async def test_without_a_first_token_the_sink_samples_it(setup: Setup) -> None:
    await setup.push([opening(num_blocks=0), commit()])
    assert setup.sink.events == ["open", "commit", None]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "sender_gone"),
        (WHOLE[:1], "sender_gone"),
        (WHOLE[:-1], "sender_gone"),
        (WHOLE[1:], "protocol"),
        ([opening(), opening()], "protocol"),
        ([opening(), pb.PushRequest()], "protocol"),
        ([opening(), block(1)], "protocol"),
        ([opening(), commit()], "protocol"),
        ([opening(), block(0, bytes(LAYOUT.block_bytes - 1))], "protocol"),
        ([opening(receiver_epoch="an older one")], "stale_epoch"),
        ([opening(layout=pb.KvLayout())], "layout_mismatch"),
    ],
)
async def test_a_broken_push_is_counted_once_under_its_reason(
    setup: Setup, messages: list[pb.PushRequest], reason: str
) -> None:
    with pytest.raises(Aborted):
        await setup.push(messages)
    assert setup.failures() == {reason: 1}
    kind = next(each for each in TransferError.__subclasses__() if each.reason == reason)
    assert setup.context.status is not None
    assert setup.context.status[0] is kind.code
    aborts = [event for event in setup.sink.events if str(event).startswith("abort")]
    assert len(aborts) == ("open" in setup.sink.events)
    assert "commit" not in setup.sink.events


@pytest.mark.parametrize("place", ["open", "1", "commit"])
@pytest.mark.parametrize("error", [UnknownTicketError("expired"), BadBlockError("damaged")])
async def test_the_refusal_is_sent_before_the_status(setup: Setup, place: str, error: TransferError) -> None:
    setup.sink.failures[place] = error
    with pytest.raises(Aborted):
        await setup.push(WHOLE)
    refused = setup.responses[-1].refused
    assert (refused.status_code, refused.message) == (error.code.value[0], str(error))
    assert setup.context.status == (error.code, str(error))
    assert setup.failures() == {error.reason: 1}
    assert (f"abort: {error}" in setup.sink.events) == (place != "open")


async def test_an_internal_error_is_sent_to_the_sender_and_raised_for_the_log(setup: Setup) -> None:
    setup.sink.failures["1"] = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        await setup.push(WHOLE)
    refused = setup.responses[-1].refused
    assert refused.status_code == grpc.StatusCode.ABORTED.value[0]
    assert "a defect" in refused.message
    assert setup.failures() == {"aborted": 1}
    assert setup.sink.events[-1].startswith("abort: the receiver failed")


async def close(responses: AsyncGenerator[pb.PushResponse, None]) -> None:
    await responses.aclose()


async def cancel(responses: AsyncGenerator[pb.PushResponse, None]) -> None:
    reading = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])


@pytest.mark.parametrize("end", [close, cancel])
async def test_a_disconnected_sender_is_counted_and_its_blocks_are_freed(
    setup: Setup, end: Callable[[AsyncGenerator[pb.PushResponse, None]], Any]
) -> None:
    async def requests() -> AsyncIterator[pb.PushRequest]:
        yield opening()
        yield block(0)
        await asyncio.Event().wait()

    async with aclosing(setup.call(requests())) as responses:
        assert (await anext(responses)).credit.num_blocks == WINDOW
        await end(responses)
    assert setup.sink.events[-1] == "abort: the sender went away before it committed"
    assert setup.failures() == {"sender_gone": 1}
