"""Says whether a worker takes requests: it serves, an operator drains it, or its process stops."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto


class DrainState(Enum):
    """The states of a worker; an operator moves it between the first two, and nothing leaves the third."""

    SERVING = auto()
    DRAINED = auto()
    """Routers choose other workers, by an operator's wish; what they still send is served."""
    STOPPING = auto()
    """The process is about to end, and new requests are refused."""


class Drain:
    """The state of one worker.

    Args:
        announce: tells the routers that an operator drains the worker, or no longer does.
    """

    def __init__(self, announce: Callable[[bool], None]) -> None:
        self._announce = announce
        self.state = DrainState.SERVING

    @property
    def is_draining(self) -> bool:
        """Whether routers should send requests to other workers."""
        return self.state is not DrainState.SERVING

    @property
    def is_stopping(self) -> bool:
        """Whether requests are refused because the process is about to end."""
        return self.state is DrainState.STOPPING

    def set_draining(self, is_draining: bool) -> None:
        """Follow an operator, and announce the change if it is one; a worker that stops goes on stopping."""
        wanted = DrainState.DRAINED if is_draining else DrainState.SERVING
        if self.state not in (wanted, DrainState.STOPPING):
            self.state = wanted
            self._announce(is_draining)

    def stop(self) -> None:
        """Refuse new requests from now on."""
        self.state = DrainState.STOPPING
