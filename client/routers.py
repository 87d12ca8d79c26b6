"""Chooses the router for each attempt of a call, and decides whether another attempt follows a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import grpc

from quire.client.errors import Overloaded, QuireError

AVOID_SECONDS = 5.0
"""Time for which a router that failed gets no new calls while others are available."""
BACKOFF_SECONDS = (0.1, 0.3, 0.9)
"""Pauses after which a call that has failed on every router tries them again."""
_LOST_STREAMS = {grpc.StatusCode.INTERNAL: "RST_STREAM", grpc.StatusCode.UNKNOWN: "Stream removed"}
"""Text in gRPC's own messages about a connection that broke, other than those with UNAVAILABLE."""

S = TypeVar("S")


@dataclass(eq=False, slots=True)
class Router(Generic[S]):
    """One router: its address, its stub, and the time until which it is avoided after a failure."""

    address: str
    stub: S
    avoided_until: float = 0.0


class Routers(Generic[S]):
    """The routers of a client, whose calls begin at each in turn.

    Args:
        addresses: host:port of each router, or one such text.
        connect: returns the stub for an address.
        clock: monotonic clock in seconds.

    Raises:
        ValueError: there is no address, or one is given twice.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        connect: Callable[[str], S],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        texts = addresses_of(addresses)
        self.all = [Router(address, connect(address)) for address in texts]
        self.clock = clock
        self._turns = count()

    def choose(self, tried: Sequence[Router[S]] = ()) -> Router[S] | None:
        """Return the router whose turn it is, preferably one that is not avoided; None: all were tried."""
        turn, now = next(self._turns), self.clock()
        in_turn = [self.all[(turn + i) % len(self.all)] for i in range(len(self.all))]
        left = [router for router in in_turn if router not in tried]
        return min(left, key=lambda router: router.avoided_until > now, default=None)

    def avoid(self, router: Router[S]) -> None:
        """Prefer other routers for ``AVOID_SECONDS``."""
        router.avoided_until = self.clock() + AVOID_SECONDS


def addresses_of(addresses: str | Sequence[str]) -> list[str]:
    """Return the addresses that a client was given, one or several.

    Raises:
        ValueError: there is no address, or one is given twice.
    """
    texts = [addresses] if isinstance(addresses, str) else list(addresses)
    if not texts or len(set(texts)) < len(texts):
        raise ValueError(f"give the address of at least one router, and each only once; got {texts}")
    return texts


class Attempts(Generic[S]):
    """The attempts of one call.

    A router that was lost, or that says UNAVAILABLE, is followed by one that has not been tried. Once every
    router was lost, all are tried again after a pause, as often as ``BACKOFF_SECONDS`` has pauses.

    Args:
        timeout: deadline of all attempts together, in seconds.
        is_stream: whether the answer is a stream. gRPC does not repeat such a call by itself; one to a single
            router is also tried again if the router refuses it, unless it has waited there.

    Attributes:
        router: the router of the present attempt.
        num_moves: number of times that an answer that was under way has moved.
    """

    def __init__(self, routers: Routers[S], timeout: float, *, is_stream: bool = False) -> None:
        self._routers = routers
        self._is_stream = is_stream
        self._deadline = routers.clock() + timeout
        self._tried: list[Router[S]] = []
        self._num_rounds = 0
        self.num_moves = 0
        first = routers.choose()
        assert first is not None
        self.router = first

    @property
    def seconds_left(self) -> float:
        """Time until the deadline, at least 0."""
        return max(0.0, self._deadline - self._routers.clock())

    def record_progress(self) -> None:
        """Learn that the present router answers: a later failure is the first one again."""
        self._tried.clear()
        self._num_rounds = 0

    def pause_after(self, error: QuireError, *, is_under_way: bool = False) -> float:
        """Choose the router of the next attempt, and return the seconds to wait before it.

        Args:
            error: the failure of the present attempt.
            is_under_way: whether a part of the answer has been delivered.

        Raises:
            QuireError: ``error``, if no attempt can help.
        """
        if isinstance(error, Overloaded) and self.num_moves and error.retry_after is not None:
            # The answer was admitted before; the places of the router that was lost are freed later.
            return self._within_deadline(error.retry_after, error)
        is_lost = is_connection_lost(error)
        if not is_lost and error.code is not grpc.StatusCode.UNAVAILABLE:
            raise error
        self._routers.avoid(self.router)
        self._tried.append(self.router)
        following, pause = self._routers.choose(self._tried), 0.0
        if following is None:
            if self._num_rounds == len(BACKOFF_SECONDS) or not self._may_repeat(error, is_lost):
                raise error
            pause = BACKOFF_SECONDS[self._num_rounds]
            self._num_rounds += 1
            self._tried.clear()
            following = self._routers.choose()
            assert following is not None
        self.router = following
        self.num_moves += is_under_way
        return self._within_deadline(pause, error)

    def _may_repeat(self, error: QuireError, is_lost: bool) -> bool:
        if len(self._routers.all) > 1:
            return is_lost
        # With one router, gRPC itself has repeated a call that is no stream.
        return self._is_stream and not error.has_waited

    def _within_deadline(self, pause: float, error: QuireError) -> float:
        if pause >= self.seconds_left:
            raise error
        return pause


def is_connection_lost(error: QuireError) -> bool:
    """Return whether the connection to a router has broken, rather than that the router sent the error."""
    if error.reason != error.code.name:
        return False
    return error.code is grpc.StatusCode.UNAVAILABLE or (
        error.code in _LOST_STREAMS and _LOST_STREAMS[error.code] in error.message
    )
