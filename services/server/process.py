"""What this process asks of its system: open files, ports, a signal when its parent dies."""

from __future__ import annotations

import ctypes
import resource
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
"""Number of the option of prctl(2) that asks for a signal."""


def raise_open_file_limit() -> None:
    """Raise the soft limit on open files to the hard limit: connections soon use up the usual 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask Linux for this signal when the parent of this process dies; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of an address of this machine that is free now; another process may bind it first."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
