"""Child processes that cannot be started."""

from __future__ import annotations

import errno
import os
from multiprocessing import resource_tracker

import pytest

from quire.services.local.child_processes import FROM_SCRATCH, start_child


def test_a_process_that_cannot_be_started_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(process: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    resource_tracker.ensure_running()
    monkeypatch.setattr(FROM_SCRATCH.Process, "start", fail)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="temporarily unavailable") as failed:
        start_child("worker", print, None)
    # The error's traceback holds the pipe: it must be closed, not only forgotten.
    assert os.listdir("/proc/self/fd") == descriptors
    assert failed.value.errno == errno.EAGAIN
