"""Computes which segments, attention heads and key-value heads each rank has. This needs no model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from quire.kernels.cpu.products.unit_product import MOST_SEGMENTS


@dataclass(frozen=True)
class Shares:
    """How an attention or an MLP is divided among ranks, in the order of ranks.

    The inputs of its last layer are divided into segments, and each segment is summed separately. A rank has
    some of the segments, and the parts of the other layers that compute these inputs. In an attention, a rank
    has whole groups of query heads with their key-value heads. If there are more ranks than groups, several
    ranks divide the query heads of one group, and each of them has the group's key-value head.

    Attributes:
        num_segments: segments of the inputs of the last layer, a power of two.
        num_heads: query heads of an attention, a multiple of the segments; 0 for an MLP.
        num_kv_heads: key-value heads of an attention; 0 for an MLP.
    """

    num_segments: int
    num_heads: int = 0
    num_kv_heads: int = 0

    def problem(self, num_ranks: int) -> str | None:
        """Return the reason why it cannot be divided among this many ranks; None if it can."""
        num_units = self._num_units
        if num_ranks > num_units and num_units != self.num_kv_heads and self.num_heads:
            return (
                f"its {self.num_heads} heads in {self.num_kv_heads} groups, and its {self.num_segments} "
                f"segments of inputs, summed separately, have common borders between {num_units} equal "
                "parts only"
            )
        if -(-num_ranks // num_units) > self.num_segments // num_units:
            return f"its inputs have only {self.num_segments} segments that are summed separately"
        return None

    def borders(self, num_ranks: int) -> list[int]:
        """Return the first segment of each rank, and the number of segments.

        Call this only if there is no ``problem``.
        """
        num_units = self._num_units
        if num_ranks <= num_units:
            per_unit = self.num_segments // num_units
            return [num_units * rank // num_ranks * per_unit for rank in range(num_ranks + 1)]
        firsts = [num_ranks * unit // num_units for unit in range(num_units + 1)]
        per_unit, found = self.num_segments // num_units, []
        for unit, (first, end) in enumerate(pairwise(firsts)):
            found += [per_unit * unit + per_unit * each // (end - first) for each in range(end - first)]
        return [*found, self.num_segments]

    def own(self, size: int, rank: int, num_ranks: int) -> slice:
        """Return a rank's part of ``size`` values, which the segments divide as equally as possible."""
        first, end = self.borders(num_ranks)[rank : rank + 2]
        return slice(first * size // self.num_segments, end * size // self.num_segments)

    def own_kv_heads(self, rank: int, num_ranks: int) -> range:
        """Return a rank's key-value heads; several ranks may have the same."""
        heads = self.own(self.num_heads, rank, num_ranks)
        return range(
            heads.start * self.num_kv_heads // self.num_heads,
            -(-heads.stop * self.num_kv_heads // self.num_heads),
        )

    @property
    def _num_units(self) -> int:
        """Largest number of equal parts of whole segments and whole groups of heads."""
        return gcd(self.num_segments, self.num_kv_heads) if self.num_heads else self.num_segments


@dataclass(frozen=True)
class DividedExperts:
    """How the experts of a layer are divided among ranks: each rank has some of them as a whole.

    The experts form segments of neighbors, whose results are summed separately.

    Attributes:
        num_experts: number of experts.
    """

    num_experts: int

    @property
    def shares(self) -> Shares:
        """The shares of the segments: a power of two of them, at most one for each expert."""
        return Shares(min(MOST_SEGMENTS, 1 << (self.num_experts.bit_length() - 1)))

    def own(self, rank: int, num_ranks: int) -> slice:
        """Return a rank's experts."""
        return self.shares.own(self.num_experts, rank, num_ranks)

    def problem(self, num_ranks: int) -> str | None:
        """Return the reason why they cannot be divided among this many ranks; None if they can."""
        if num_ranks <= self.shares.num_segments:
            return None
        return f"its {self.num_experts} experts form only {self.shares.num_segments} groups for ranks"
