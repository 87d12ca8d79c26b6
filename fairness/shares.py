"""Divides tokens among clients: at one moment, and over time.

Over time each client has a level: the tokens that it was served, divided by its weight. The client with the
lowest level is served first, so clients that always want more keep equal levels. This is the virtual token
counter of Sheng et al. (OSDI 2024) with one difference. There, a client that returns is lifted to the level
of the others, and a small client gets half of each step that it shares with one other. Here it may lag by a
limited credit, so what it did not use a moment ago is served at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


def fair_shares(
    demands: Mapping[K, int],
    capacity: int,
    weights: Mapping[K, int] | None = None,
    levels: Mapping[K, float] | None = None,
) -> dict[K, int]:
    """Return what each client gets: the client of the lowest level is served until another's is as low.

    Without levels and weights these are max-min fair shares: a demand below an equal part is met, and the
    other demands share the rest. The smallest demands, then the first, get what cannot be divided equally::

        fair_shares({"a": 2, "b": 9, "c": 9}, 12) == {"a": 2, "b": 5, "c": 5}
        fair_shares({"a": 9, "b": 9}, 12, weights={"a": 2, "b": 1}) == {"a": 8, "b": 4}
        fair_shares({"a": 9, "b": 9}, 12, levels={"a": 4, "b": 0}) == {"a": 4, "b": 8}
    """
    weight = {key: (weights or {}).get(key, 1) for key in demands}
    level = {key: (levels or {}).get(key, 0.0) for key in demands}
    reached = _reached_level(demands, capacity, weight, level)
    shares = {
        key: min(demand, max(0, math.floor((reached - level[key]) * weight[key])))
        for key, demand in demands.items()
    }
    num_left = min(capacity, sum(demands.values())) - sum(shares.values())
    while num_left > 0:  # once, but for rounding errors
        for key in sorted(demands, key=lambda key: (level[key], demands[key])):
            if num_left > 0 and shares[key] < demands[key] and level[key] <= reached:
                shares[key] += 1
                num_left -= 1
    return shares


def _reached_level(
    demands: Mapping[K, int], capacity: int, weight: Mapping[K, int], level: Mapping[K, float]
) -> float:
    """Return the level up to which ``capacity`` serves the clients that want so much."""
    begins = [(level[key], weight[key]) for key in demands]
    ends = [(level[key] + demand / weight[key], -weight[key]) for key, demand in demands.items()]
    reached, rate, left = 0.0, 0, float(capacity)
    for at, change in sorted(begins + ends):
        if rate and (at - reached) * rate >= left:
            return reached + left / rate
        left -= (at - reached) * rate if rate else 0.0
        reached, rate = at, rate + change
    return reached


class _Client(NamedTuple):
    """A client's level, and the highest level of all when it last joined or was served."""

    level: float
    seen_at: float


class ServedTokens(Generic[K]):
    """The levels of clients.

    Args:
        credit: how far below the highest level a client may be.
    """

    def __init__(self, credit: float) -> None:
        self.credit = credit
        self._clients: dict[K, _Client] = {}
        """Those that joined or were served, so were seen, while the highest level rose by the credit."""
        self._highest = 0.0

    @property
    def _floor(self) -> float:
        return max(0.0, self._highest - self.credit)

    def level(self, client: K) -> float:
        """Return the level of a client; one that was not seen recently is at the floor."""
        known = self._clients.get(client)
        return self._floor if known is None else max(known.level, self._floor)

    def lowest(self, but: Collection[K] = ()) -> float | None:
        """Return the lowest level of the clients seen recently; None if there are none ``but`` some."""
        levels = [known.level for client, known in self._clients.items() if client not in but]
        return max(self._floor, min(levels)) if levels else None

    def serve(self, client: K, num_tokens: int, weight: int = 1) -> None:
        """Raise the level of a client by the tokens that it was served."""
        self._put(client, self.level(client) + num_tokens / weight)

    def join(self, client: K) -> None:
        """Count a client as present. It keeps its level; a newcomer begins at the lowest level of the others.

        A newcomer that floods is thus not before those that are here, and one that asks for little is not
        behind them.
        """
        lowest = None if client in self._clients else self.lowest()
        self._put(client, self.level(client) if lowest is None else lowest)

    def _put(self, client: K, level: float) -> None:
        self._highest = max(self._highest, level)
        self._clients.pop(client, None)
        self._clients[client] = _Client(level, self._highest)
        # The first one is the one that was not seen for the longest time.
        while next(iter(self._clients.values())).seen_at < self._floor:
            del self._clients[next(iter(self._clients))]
