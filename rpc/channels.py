"""gRPC channels to workers, which pushes, pulls and all other calls share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from quire.rpc.proof import Caller, Peer

MAX_MESSAGE_BYTES = 256 << 20
"""Largest gRPC message. A message carries whole blocks, and one block of a 70B model has 5 MiB, more than
gRPC's default limit of 4 MiB."""

NO_PROXY = ("grpc.enable_http_proxy", 0)
"""The option by which a channel ignores ``http_proxy`` and ``https_proxy``, which gRPC would use even for the
loopback."""
PING_TIMEOUTS = [
    ("grpc.keepalive_timeout_ms", 10_000),
    # This limit, which is a minute by default, also applies to the pings with which gRPC measures bandwidth.
    ("grpc.http2.ping_timeout_ms", 10_000),
]
"""Options that limit the wait for the answer to a ping, after which the connection counts as broken."""
IDLE_SECONDS = 300.0
"""A channel without a user for this long is closed."""

LOOK_SECONDS = 10.0
"""Interval between two searches for unused channels."""

CHANNEL_OPTIONS = [
    NO_PROXY,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # With these pings a vanished machine is detected after 20 s; TCP gives up only after 15 min.
    ("grpc.keepalive_time_ms", 10_000),
    *PING_TIMEOUTS,
    # By default gRPC stops after two pings while no data flows, as happens during a long prefill.
    ("grpc.http2.max_pings_without_data", 0),
    # The default back-off grows to two minutes, and a restarted peer would be unreachable for that long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class ChannelPool:
    """Keeps one channel to each worker that was called recently; all transfers share it.

    An open channel keeps trying to connect to a worker that is gone, so unused channels are closed.

    Args:
        connect: opens a channel; takes an address and options.
        caller: signs the calls.
    """

    def __init__(
        self,
        connect: Callable[..., grpc.aio.Channel] = grpc.aio.insecure_channel,
        caller: Caller | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._caller = caller or Caller()
        self._clock = clock
        self._channels: dict[tuple[str, str], _Shared] = {}

    def __len__(self) -> int:
        """Return how many channels are open."""
        return len(self._channels)

    @contextmanager
    def peer(self, address: str, epoch: str) -> Iterator[Peer]:
        """Yield the worker at ``host:port`` with this epoch; its channel stays open inside the context."""
        shared = self._channels.get((address, epoch))
        if shared is None:
            shared = _Shared(self._connect(address, options=CHANNEL_OPTIONS))
            self._channels[address, epoch] = shared
        shared.num_users += 1
        try:
            yield Peer(shared.channel, self._caller, address, epoch)
        finally:
            shared.num_users -= 1
            shared.used_at = self._clock()

    async def close_unused(self) -> None:
        """Close each channel without a user that has no connection or was unused for ``IDLE_SECONDS``.

        A channel whose worker has ended is idle until the next call, which would fail.
        """
        now = self._clock()
        for key, shared in list(self._channels.items()):
            if shared.num_users:
                continue
            is_connected = shared.channel.get_state() is grpc.ChannelConnectivity.READY
            if not is_connected or now - shared.used_at >= IDLE_SECONDS:
                # Remove it from the pool first, so that no call uses it while it is being closed.
                del self._channels[key]
                await shared.channel.close(None)

    async def close_unused_forever(self) -> None:
        """Close unused channels every ``LOOK_SECONDS``, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.close_unused()

    async def close(self) -> None:
        """Close all channels."""
        channels = [shared.channel for shared in self._channels.values()]
        self._channels.clear()
        for channel in channels:
            await channel.close(None)


@dataclass(eq=False, slots=True)
class _Shared:
    channel: grpc.aio.Channel
    num_users: int = 0
    used_at: float = 0.0


class ChannelClosedError(Exception):
    """The channel was closed before the call or during it."""


@contextmanager
def closed_channel_errors() -> Iterator[None]:
    """Raise ``ChannelClosedError`` for a call on a closed channel.

    If the channel is closed before a call begins, gRPC raises ``UsageError``. If it is closed during the
    call, gRPC raises ``CancelledError``, although the task that waits for the call was not cancelled.
    """
    try:
        yield
    except grpc.aio.UsageError as error:
        raise ChannelClosedError(str(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ChannelClosedError("the channel was closed during the call") from error
