"""The sockets of a worker's KV events: one publishes, and one replays what a subscriber has missed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import zmq
import zmq.asyncio

MAX_QUEUED = 1000
"""Most messages that wait for a slow subscriber; then all subscribers wait for it."""
RETRY_SECONDS = 0.01
STALLED_SECONDS = 5.0
"""Longest time for which all wait for a slow subscriber; then all connections are closed."""

Replay = Callable[[bytes, int], Iterable[list[bytes]]]
"""Function that returns the messages to a subscriber, by its identity and the first number that it lacks."""


class EventSockets:
    """A socket that publishes on a port, and one for replays on the next port.

    A subscriber misses no message while its connection lasts: if its queue is full, ``send`` waits. Each
    subscription is reported, also that after a broken connection.

    Args:
        address: host:port of the first socket.
        replay: answers a request for a replay.
        on_subscribed: is called after each subscription.

    Raises:
        OSError: one of the ports is taken.
    """

    def __init__(self, address: str, replay: Replay, on_subscribed: Callable[[], None]) -> None:
        host, _, port = address.rpartition(":")
        self._addresses = f"tcp://{host}:{port}", f"tcp://{host}:{int(port) + 1}"
        self._replay = replay
        self._on_subscribed = on_subscribed
        self._sockets: list[zmq.asyncio.Socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.open()

    def open(self) -> None:
        """Listen, unless the sockets listen already.

        Raises:
            OSError: one of the ports is taken.
        """
        if self._sockets:
            return
        self._context = zmq.asyncio.Context()
        # An XPUB socket publishes like a PUB socket, and also receives the subscriptions.
        publisher = self._socket(zmq.XPUB, {zmq.XPUB_VERBOSE: 1, zmq.XPUB_NODROP: 1, zmq.SNDHWM: MAX_QUEUED})
        # A ROUTER socket drops messages beyond its limit. The messages of a replay are in memory anyway.
        replayer = self._socket(zmq.ROUTER, {zmq.SNDHWM: 0})
        try:
            for socket, address in zip(self._sockets, self._addresses, strict=True):
                socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"cannot publish KV events at {address}: {error.strerror}") from error
        loop = asyncio.get_running_loop()
        self._tasks += [
            loop.create_task(self._hear_subscriptions(publisher)),
            loop.create_task(self._answer_requests(replayer)),
        ]

    def _socket(self, kind: int, options: dict[int, int]) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        for name, value in {zmq.LINGER: 0, **options}.items():
            socket.setsockopt(name, value)
        return socket

    def close(self) -> None:
        """End all connections, and drop the messages that wait."""
        for task in self._tasks:
            task.cancel()
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        self._tasks.clear()
        self._context.term()  # after this the ports are free

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message to all subscribers.

        Raises:
            TimeoutError: a subscriber read nothing for too long, so all connections have been closed.
        """
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                while not await self._is_queued(frames):  # noqa: ASYNC110  # ZeroMQ does not say when there is room
                    await asyncio.sleep(RETRY_SECONDS)
        except TimeoutError:
            self.close()
            raise TimeoutError(f"a subscriber of KV events read nothing for {STALLED_SECONDS:g} s") from None

    async def _is_queued(self, frames: Sequence[bytes]) -> bool:
        try:
            await self._sockets[0].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def _hear_subscriptions(self, publisher: zmq.asyncio.Socket) -> None:
        while True:
            if (await publisher.recv()).startswith(b"\x01"):
                self._on_subscribed()

    async def _answer_requests(self, replayer: zmq.asyncio.Socket) -> None:
        while True:
            identity, *request = await replayer.recv_multipart()
            if len(request) == 2 and len(request[1]) == 8:
                for frames in self._replay(identity, int.from_bytes(request[1], "big")):
                    await replayer.send_multipart(frames)
                    await asyncio.sleep(0)  # a long replay must not hold the event loop up
