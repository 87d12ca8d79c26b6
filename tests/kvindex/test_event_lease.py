"""KV events over real sockets, between a publisher and subscribers in one process."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
import zmq

from quire.kvindex import event_lease, event_sockets
from quire.kvindex.block_hash import block_hash
from quire.kvindex.event_frames import public_hash
from quire.kvindex.event_lease import EventLease
from quire.kvindex.publish_ledger import BlockContent, PublishLedger
from quire.kvindex.publisher import BlockPublisher
from quire.kvindex.worker_record import WorkerRecord
from tests.testing.kv_event_mirror import KvEventMirror, free_events_port, mirrored
from tests.testing.until import until

SHARED, TENANT = b"shared root.....", b"tenant's root..."
RECORD = WorkerRecord("w", "decode", "host:1", "epoch", "fingerprint")
Blocks = list[tuple[bytes, BlockContent]]


def chain(length: int, seed: int = 0, root: bytes = SHARED, block_size: int = 2) -> Blocks:
    """Return blocks that follow each other."""
    blocks: Blocks = []
    for index in range(length):
        parent, token_ids = blocks[-1][0] if blocks else root, array("I", [seed, index] * (block_size // 2))
        blocks.append((block_hash(parent, token_ids), BlockContent(parent, token_ids, index == 0)))
    return blocks


def evict(publisher: BlockPublisher, blocks: Blocks) -> None:
    publisher.removed([each for each, _ in reversed(blocks)])


@asynccontextmanager
async def publishing(port: int) -> AsyncIterator[BlockPublisher]:
    ledger = PublishLedger()
    lease = EventLease(f"127.0.0.1:{port}", "model", SHARED, ledger, lambda: publisher.join_again())
    loop = asyncio.get_running_loop()
    publisher = BlockPublisher(lease, ledger, loop, beat_seconds=60.0, rejoin_jitter_seconds=0.0)
    publisher.start(RECORD)
    try:
        yield publisher
    finally:
        await publisher.close()
        lease.close()


async def until_agreed(mirror: KvEventMirror, publisher: BlockPublisher) -> None:
    ledger = publisher.ledger

    def agrees() -> bool:
        held = {public_hash(each) for each in ledger._held}
        return ledger.is_following and not ledger.num_pending and {*mirror.parents} == held

    await until(agrees)


async def test_subscribers_follow_even_if_they_lose_messages() -> None:
    random, port = Random(3), free_events_port()
    is_lossy = False
    async with (
        publishing(port) as publisher,
        mirrored(port) as steady,
        mirrored(port, lambda: is_lossy and random.random() < 0.3) as lossy,
    ):
        await until(lambda: steady.num_logs and lossy.num_logs)
        await until_agreed(steady, publisher)
        before, is_lossy = steady.num_replays, True
        chains: list[Blocks] = []
        for seed in range(60):
            if random.random() < 0.7 or not chains:
                chains.append(chain(random.randint(1, 9), seed))
                publisher.described(chains[-1])
            else:
                evict(publisher, chains.pop(random.randrange(len(chains))))
            await until_agreed(steady, publisher)
        is_lossy = False
        publisher.described(chain(1, seed=60))  # shows that the messages before it were lost, if they were
        await until_agreed(lossy, publisher)
        assert lossy.num_replays
        assert steady.num_replays == before
        assert steady.topic == b"kv@host:1@model"


async def test_a_late_subscriber_gets_everything_without_asking() -> None:
    port = free_events_port()
    async with publishing(port) as publisher:
        await publisher.has_joined.wait()
        publisher.described(chain(9))
        publisher.described(chain(4, seed=1, root=TENANT))
        await until(lambda: not publisher.ledger.num_pending)
        async with mirrored(port) as late:
            await until_agreed(late, publisher)
            [(shared, _)], [(salted, _)] = chain(1), chain(1, seed=1, root=TENANT)
            assert late.scopes[public_hash(shared)] is None
            assert str(late.scopes[public_hash(salted)]).startswith("dynamo-cache-salt:")


async def test_a_new_log_replaces_one_that_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_lease, "MAX_CHANGES", 20)
    port = free_events_port()
    async with publishing(port) as publisher, mirrored(port) as mirror:
        await until_agreed(mirror, publisher)
        await until(lambda: mirror.num_logs)
        before, num_replays = mirror.num_logs, mirror.num_replays
        publisher.described(chain(2))
        for seed in range(1, 20):
            publisher.described(chain(2, seed))
            await until_agreed(mirror, publisher)
            evict(publisher, chain(2, seed))
            await until_agreed(mirror, publisher)
        assert mirror.num_logs > before
        assert len(mirror.parents) == 2
        assert mirror.num_replays == num_replays


async def test_a_restart_on_the_same_port_is_noticed() -> None:
    port = free_events_port()
    async with mirrored(port) as mirror:
        for seed in range(2):
            async with publishing(port) as publisher:
                publisher.described(chain(5 - seed, seed))
                await until_agreed(mirror, publisher)
                assert len(mirror.parents) == 5 - seed


async def test_a_subscriber_that_reads_nothing_delays_others_only_for_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_sockets, "MAX_QUEUED", 5)
    monkeypatch.setattr(event_sockets, "STALLED_SECONDS", 0.2)
    port, context = free_events_port(), zmq.Context()
    stalled = context.socket(zmq.SUB)
    for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
        stalled.setsockopt(option, value)
    stalled.subscribe(b"")
    stalled.connect(f"tcp://127.0.0.1:{port}")
    try:
        async with publishing(port) as publisher, mirrored(port) as mirror:
            for seed in range(100_000, 100_060):  # each message has 2 MB, and the buffers have room for some
                publisher.described(blocks := chain(100, seed, block_size=8000))
                await until_agreed(mirror, publisher)
                evict(publisher, blocks)
                await until_agreed(mirror, publisher)
                if "index_unreachable" in caplog.text:
                    break
            else:
                pytest.fail("the subscriber that reads nothing has delayed nobody")
    finally:
        stalled.close()
        context.term()


async def test_a_port_that_is_taken_is_an_error() -> None:
    port = free_events_port()
    async with publishing(port):
        with pytest.raises(OSError, match=f"cannot publish KV events at tcp://127.0.0.1:{port}: Address"):
            async with publishing(port):
                pass
