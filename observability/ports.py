"""Ports in a row, for processes that must be told theirs."""

from __future__ import annotations

import socket
from random import SystemRandom

FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Below those that Linux gives to whoever asks for any: none is taken by chance once it was found free."""


def free_ports(count: int) -> int:
    """Return the first of some loopback ports in a row that are free now."""
    random = SystemRandom()
    while True:
        first = random.randrange(FIRST_PORT, LAST_PORT - count)
        if all(_is_free(first + index) for index in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
