"""A gateway's index of one worker, built from the worker's KV events alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from random import SystemRandom
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from quire.kvindex.event_frames import END

REPLAY_SECONDS = 5.0


class KvEventMirror:
    """The blocks that a worker says it has, with the parent of each.

    A batch whose number is neither 0 nor the next one shows that others were missed, or that a new log has
    begun. The mirror then asks for all batches again.

    Args:
        port: the port of the events on the loopback.
        is_lost: says of each live message whether to lose it, as a network may.
    """

    def __init__(self, port: int, is_lost: Callable[[], bool]) -> None:
        self._context = zmq.asyncio.Context()
        self._port = port
        self._is_lost = is_lost
        self._live = self._connect(zmq.SUB, port)
        self._live.subscribe(b"")
        self._last = -1
        self.parents: dict[int, int | None] = {}
        self.scopes: dict[int, str | None] = {}
        """The scopes of the blocks that begin a prompt."""
        self.topic = b""
        self.num_replays = 0
        self.num_logs = 0

    def _connect(self, kind: int, port: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    async def follow(self) -> None:
        """Apply live messages until cancelled."""
        while True:
            self.topic, number_bytes, batch = await self._live.recv_multipart()
            number = int.from_bytes(number_bytes, "big")
            if self._is_lost():
                continue
            if number in (0, self._last + 1):
                self._apply(number, batch)
            else:
                await self._catch_up()

    async def _catch_up(self) -> None:
        self.num_replays += 1
        replay = self._connect(zmq.DEALER, self._port + 1)
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                await replay.send_multipart([b"", bytes(8)])
                expected = 0
                while (message := await replay.recv_multipart()) != [b"", b"", END, b""]:
                    empty, topic, number, batch = message
                    assert (empty, int.from_bytes(number, "big")) == (b"", expected)
                    assert topic.startswith(b"kv@")
                    self._apply(expected, batch)
                    expected += 1
        except TimeoutError:  # the worker has ended; the next one begins a new log
            self._last = -1
        finally:
            replay.close()

    def _apply(self, number: int, batch: bytes) -> None:
        _, events, rank = msgpack.unpackb(batch)
        assert rank == 0
        assert number or events == [{"type": "AllBlocksCleared"}]
        self._last = number
        for event in events:
            getattr(self, f"_on_{event.pop('type')}")(**event)

    def _on_AllBlocksCleared(self) -> None:
        self.num_logs += 1
        self.parents.clear()
        self.scopes.clear()

    def _on_BlockStored(self, **event: Any) -> None:
        hashes, parent = event["block_hashes"], event["parent_block_hash"]
        assert parent is None or parent in self.parents, "a block came before its parent"
        assert len(event["token_ids"]) == len(hashes) * event["block_size"]
        if parent is None:
            first_keys, *other_keys = event.get("extra_keys", [None] * len(hashes))
            assert other_keys == [None] * (len(hashes) - 1)
            self.scopes[hashes[0]] = first_keys and first_keys[0]
        for each in hashes:
            self.parents[each], parent = parent, each

    def _on_BlockRemoved(self, block_hashes: list[int], medium: str) -> None:
        assert medium == "GPU"
        for each in block_hashes:
            self.parents.pop(each, None)
            self.scopes.pop(each, None)
        assert not {*block_hashes} & {*self.parents.values()}, "a parent went before its child"

    def close(self) -> None:
        """Close the connection."""
        self._live.close()
        self._context.term()


def free_events_port() -> int:
    """Return a free port of the loopback for events, whose next one is free too.

    Linux gives ports from 32768 on to connections, so a subscriber that waits there could connect to itself.
    """
    while True:
        port = SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


@asynccontextmanager
async def mirrored(port: int, is_lost: Callable[[], bool] = lambda: False) -> AsyncIterator[KvEventMirror]:
    """Yield a mirror that follows a worker, and fail if it could not."""
    mirror = KvEventMirror(port, is_lost)
    task = asyncio.create_task(mirror.follow())
    try:
        yield mirror
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])
        mirror.close()
