"""Channels to workers, for pushes, pulls and all else."""

from __future__ import annotations

from collections.abc import Callable

import grpc.aio

MAX_MESSAGE_BYTES = 256 << 20
"""One message carries whole blocks; a 70B model's has 5 MiB, so the default of 4 MiB would refuse it."""

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine vanished is noticed after 30 s, not when TCP gives up after 15 min.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without this the core stops its pings after two when no data flows, as in a long prefill.
    ("grpc.http2.max_pings_without_data", 0),
    # The default back-off grows to two minutes: a restarted peer would stay unreachable as long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class ChannelPool:
    """One channel for each worker, shared by all transfers.

    Args:
        connect: opens a channel; takes an address and options.
    """

    def __init__(self, connect: Callable[..., grpc.aio.Channel] = grpc.aio.insecure_channel) -> None:
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        """Return the channel to ``host:port``."""
        if address not in self._channels:
            self._channels[address] = self._connect(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    async def close(self) -> None:
        """Close all channels."""
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()
