"""Which hosts other machines cannot reach; any doubt counts against a host."""

from __future__ import annotations

import pytest

from quire.rpc.loopback import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0",
        "::",
        "10.0.0.5",
        "localhost.example.com",
        "127.0.0.1.example.com",
        "127.1",
        "2130706433",
    ],
)
def test_reachable(host: str) -> None:
    assert not is_loopback(host)
