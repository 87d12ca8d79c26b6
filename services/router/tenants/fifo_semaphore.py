"""Lets a fixed number of requests run at the same time, in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque


class FifoSemaphore:
    """A fixed number of places for requests; requests without a place wait in order of arrival."""

    def __init__(self) -> None:
        self._num_places = 0
        self._num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for places."""
        return len(self._waiting)

    def has_room(self, num_places: int) -> bool:
        """Return whether a request could take its places now: no other waits, and enough are free."""
        return not self._waiting and self._num_taken + num_places <= self._num_places

    def resize(self, num_places: int) -> None:
        """Change the number of places; running requests keep theirs."""
        self._num_places = num_places
        self._call_next()

    async def enter(self, num_places: int) -> None:
        """Acquire places; wait until they are free and earlier requests have theirs."""
        if self.has_room(num_places):
            self._num_taken += num_places
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_places, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The request got its places just before it was cancelled: pass them on to the next one.
                self.leave(num_places)
            else:
                if (num_places, turn) in self._waiting:
                    self._waiting.remove((num_places, turn))
                self._call_next()  # requests behind it may need fewer places
            raise

    def leave(self, num_places: int) -> None:
        """Release places."""
        self._num_taken -= num_places
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            num_places, turn = self._waiting[0]
            # A waiting request that was cancelled may not have removed itself yet: skip it.
            if not turn.done():
                if self._num_taken + num_places > self._num_places:
                    return
                self._num_taken += num_places
                turn.set_result(None)
            self._waiting.popleft()
