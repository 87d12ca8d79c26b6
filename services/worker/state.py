"""Keeps the present state of a worker: its role, whether it drains, and whether its engine is stalled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import Enum, auto

from quire.engine.weights.adapters import Adapter
from quire.kvindex.worker_record import ROLES
from quire.rpc.errors import (
    ADAPTER_NOT_LOADED,
    DRAINING,
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)


class DrainState(Enum):
    """How far a worker drains."""

    SERVING = auto()
    DRAINED = auto()
    """Routers choose other workers, and move answers there. Requests that they still send are served."""
    STOPPING = auto()
    """The process is about to end, and new requests are refused."""


class WorkerState:
    """The state of one worker. Its listeners are called after each change.

    It has four parts, which do not depend on each other:

    | Part       | Changes                       | By                                       |
    |------------|-------------------------------|------------------------------------------|
    | role       | prefill <-> decode            | a router, for an operator or by itself   |
    | drain      | SERVING <-> DRAINED           | an operator                              |
    |            | SERVING, DRAINED -> STOPPING  | the process, when it is about to end     |
    | is_stalled | False <-> True                | the engine's thread, by its watch        |
    | adapters   | any                           | an operator                              |

    The role only determines which new requests routers send here. The worker serves the same calls in both
    roles, so a change of role stops no request and drops no block.

    Args:
        role: the first role.
        clock: returns seconds that never go back.

    Attributes:
        role: present role, which determines the requests that routers send.
        drain: how far the worker drains.
        is_stalled: whether the engine makes no progress.
        adapters: the loaded adapters by name.
    """

    def __init__(self, role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.role = role
        self._role_changed_at: float | None = None
        self.drain = DrainState.SERVING
        self.is_stalled = False
        self.adapters: Mapping[str, Adapter] = {}
        self._clock = clock
        self._listeners: list[Callable[[], None]] = []

    def call_on_change(self, listener: Callable[[], None]) -> None:
        """Call a function after each change from now on."""
        self._listeners.append(listener)

    @property
    def is_draining(self) -> bool:
        """Whether routers should send requests to other workers."""
        return self.drain is not DrainState.SERVING

    @property
    def is_stopping(self) -> bool:
        """Whether requests are refused because the process is about to end."""
        return self.drain is DrainState.STOPPING

    def set_adapter(self, name: str, adapter: Adapter | None) -> None:
        """Serve an adapter under a name from now on; None: none."""
        kept = {each: known for each, known in self.adapters.items() if each != name}
        self.adapters = kept if adapter is None else {**kept, name: adapter}
        self._announce()

    def adapter_of(self, digest: str) -> Adapter | None:
        """Return the adapter whose weights have a digest; an empty digest stands for none.

        Raises:
            Aborted: there is no such adapter here.
        """
        found = [adapter for adapter in self.adapters.values() if adapter.digest == digest]
        if digest and not found:
            raise Aborted(f"the adapter {digest} is not loaded here", reason=ADAPTER_NOT_LOADED)
        return found[0] if digest else None

    def change_role(self, role: str, min_seconds_in_role: float = 0.0) -> None:
        """Change the role.

        Args:
            min_seconds_in_role: least time since the previous change; the first role counts as old enough.

        Raises:
            InvalidArgument: there is no such role.
            FailedPrecondition: the previous change was too recent.
        """
        if role not in ROLES:
            raise InvalidArgument("role", f"must be prefill or decode; got {role!r}")
        if role == self.role:
            return
        now, changed_at = self._clock(), self._role_changed_at
        if changed_at is not None and now - changed_at < min_seconds_in_role:
            raise FailedPrecondition(
                f"this worker became a {self.role} worker {now - changed_at:.0f} s ago, "
                f"and may change again after {min_seconds_in_role:g} s",
                reason="ROLE_TOO_NEW",
            )
        self.role, self._role_changed_at = role, now
        self._announce()

    def set_draining(self, is_draining: bool) -> None:
        """Begin or end draining; do nothing if the worker is stopping."""
        self._change_drain(DrainState.DRAINED if is_draining else DrainState.SERVING)

    def stop(self) -> None:
        """Refuse new requests from now on."""
        self._change_drain(DrainState.STOPPING)

    def check_not_stopping(self) -> None:
        """Check that a new request may run.

        Raises:
            Unavailable: the process is about to end.
        """
        if self.is_stopping:
            raise Unavailable("this worker is stopping; send requests to another", reason=DRAINING)

    def set_stalled(self, is_stalled: bool) -> None:
        """Record that the engine is stalled, or that it makes progress again."""
        if is_stalled != self.is_stalled:
            self.is_stalled = is_stalled
            self._announce()

    def _change_drain(self, drain: DrainState) -> None:
        if self.drain not in (drain, DrainState.STOPPING):
            self.drain = drain
            self._announce()

    def _announce(self) -> None:
        for listener in self._listeners:
            listener()
