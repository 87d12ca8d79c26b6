"""What counts as growth of a process at rest."""

from __future__ import annotations

from collections import Counter

from tests.soak.chaos.processes import TaskReport
from tests.soak.chaos.rest import FILES_MARGIN, Size, growth
from tests.soak.chaos.schedule import Shape

SHAPE = Shape(("router-0", "router-1"), ("prefill-0", "prefill-1"), ("decode-0", "decode-1"))
CONNECTED = 9 + 2 + 3 * 4
"""Sockets of a worker that two routers use, and that is connected with three others in both directions."""


def size(num_sockets: int, num_channels: int = 0) -> Size:
    return Size(1, 100.0, 20, num_sockets, TaskReport(Counter(), num_channels))


def test_a_worker_that_meets_the_others_has_not_grown() -> None:
    assert growth("prefill-0", size(9), size(CONNECTED), SHAPE) == []
    assert growth("prefill-0", size(9), size(CONNECTED + 1), SHAPE) == [
        f"prefill-0 had 9 sockets, and then {CONNECTED + 1}"
    ]
    assert growth("prefill-0", size(9), size(9, num_channels=3), SHAPE) == []
    assert growth("prefill-0", size(9), size(9, num_channels=4), SHAPE) != []


def test_a_router_and_a_connected_worker_have_only_the_margin() -> None:
    for name in ("router-0", "prefill-0"):
        before, most = size(CONNECTED), CONNECTED + FILES_MARGIN
        assert growth(name, before, size(most), SHAPE) == []
        assert growth(name, before, size(most + 1), SHAPE) != []
