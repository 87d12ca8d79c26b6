"""A file of weights: nobody can change it once it is complete, and a dead process does not keep it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

from quire.engine.weights.weights_file import WeightsFile

HOLD_AND_WRITE_HALF = """
import os, sys
from quire.engine.weights.weights_file import WeightsFile

file = WeightsFile(int(sys.argv[1]), -1)
with file.locked():
    os.write(file.descriptor, b"half")
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_sealed_file_cannot_be_changed_in_any_way(file: WeightsFile) -> None:
    os.ftruncate(file.descriptor, mmap.PAGESIZE)
    assert not file.is_complete
    file.seal()
    assert file.is_complete
    for change in (
        lambda: os.write(file.descriptor, b"other"),
        lambda: os.ftruncate(file.descriptor, 0),
        lambda: os.ftruncate(file.descriptor, 2 * mmap.PAGESIZE),
        lambda: mmap.mmap(file.descriptor, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    with mmap.mmap(file.descriptor, 0, prot=mmap.PROT_READ) as mapping, pytest.raises(TypeError):
        mapping[0] = 1


def test_only_one_process_holds_the_file_and_others_wait_no_longer_than_they_say(file: WeightsFile) -> None:
    timeout = pytest.raises(TimeoutError, match="another worker has not written them in 0 s")
    with file.locked(), timeout, file.locked(0.0):
        pass
    with file.locked(0.0):
        pass


def test_a_process_that_is_killed_while_it_writes_leaves_the_file_incomplete_and_free(
    file: WeightsFile,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_WRITE_HALF, str(file.descriptor)],
        pass_fds=[file.descriptor],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(TimeoutError), file.locked(0.0):
            pass
        process.kill()
    with file.locked(0.0):
        assert not file.is_complete
        assert os.fstat(file.descriptor).st_size == len(b"half")
