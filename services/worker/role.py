"""The role of a worker, which routers change while the worker serves."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.kvindex.membership import ROLES
from quire.rpc.errors import FailedPrecondition, InvalidArgument


class WorkerRole:
    """The present role of one worker.

    The role only tells routers which new requests to send here. The worker serves the same calls in both
    roles, so a change stops no request and drops no block.

    Args:
        role: the first role.
        announce: called after each change; tells the routers.
        clock: returns seconds that never go back.
    """

    def __init__(
        self, role: str, announce: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.present = role
        self._announce = announce
        self._clock = clock
        self._changed_at: float | None = None

    def change(self, role: str, min_seconds_in_role: float = 0.0) -> None:
        """Change the role, and announce the change if it is one.

        Args:
            min_seconds_in_role: least time since the previous change; the first role counts as old enough.

        Raises:
            InvalidArgument: there is no such role.
            FailedPrecondition: the previous change was too recent.
        """
        if role not in ROLES:
            raise InvalidArgument("role", f"must be prefill or decode; got {role!r}")
        if role == self.present:
            return
        now = self._clock()
        if self._changed_at is not None and now - self._changed_at < min_seconds_in_role:
            raise FailedPrecondition(
                f"this worker became a {self.present} worker {now - self._changed_at:.0f} s ago, "
                f"and may change again after {min_seconds_in_role:g} s",
                reason="ROLE_TOO_NEW",
            )
        self.present, self._changed_at = role, now
        self._announce()
