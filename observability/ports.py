"""Finds consecutive free ports, for processes that need their ports as settings."""

from __future__ import annotations

import socket
from random import SystemRandom

FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Range below the ports that Linux assigns dynamically, so that a port found free is not taken by chance."""


def free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive loopback ports that are free now."""
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
