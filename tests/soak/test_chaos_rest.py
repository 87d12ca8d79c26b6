"""What counts as growth of a process at rest."""

from __future__ import annotations

from collections import Counter

from tests.soak.chaos.processes import TaskReport
from tests.soak.chaos.rest import FILES_MARGIN, FILES_OF_A_PEER, Size, growth
from tests.soak.chaos.schedule import Shape

SHAPE = Shape(("router-0", "router-1"), ("prefill-0", "prefill-1"), ("decode-0", "decode-1"))
NUM_FILES = 20


def size(num_more_files: int = 0, num_channels: int = 0) -> Size:
    return Size(1, 100.0, NUM_FILES + num_more_files, TaskReport(Counter(), num_channels))


def test_a_worker_that_meets_the_others_has_not_grown() -> None:
    most = FILES_MARGIN + 3 * FILES_OF_A_PEER
    assert growth("prefill-0", size(), size(most, num_channels=3), SHAPE) == []
    assert growth("prefill-0", size(), size(most + 1, num_channels=3), SHAPE) == [
        f"prefill-0 had {NUM_FILES} open files, and then {NUM_FILES + most + 1}"
    ]
    assert growth("prefill-0", size(), size(num_channels=4), SHAPE) != []


def test_a_router_and_a_worker_that_meets_nobody_have_only_the_margin() -> None:
    for name in ("router-0", "prefill-0"):
        assert growth(name, size(), size(FILES_MARGIN), SHAPE) == []
        assert growth(name, size(), size(FILES_MARGIN + 1), SHAPE) != []
    assert growth("router-0", size(), size(FILES_MARGIN + 1, num_channels=2), SHAPE) != []
