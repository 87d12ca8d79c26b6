"""What one step does: the blocks that it moves, and the tokens that it computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.sequences.sequence import ScheduledSequence, Sequence


class StepKind(NamedTuple):
    """The size of a step, in powers of two."""

    token_bits: int
    """Bit length of the number of tokens that the step computes."""
    read_bits: int
    """Bit length of the number of cached tokens to which all its tokens together attend."""

    @classmethod
    def of(cls, num_tokens: int, num_read_tokens: int) -> StepKind:
        """Return the kind of a step with these counts."""
        return cls(num_tokens.bit_length(), num_read_tokens.bit_length())

    def fits_in(self, other: StepKind) -> bool:
        """Return whether both numbers of the other kind are at least as large."""
        return self.token_bits <= other.token_bits and self.read_bits <= other.read_bits


@dataclass(slots=True)
class Schedule:
    """What one step does: it moves blocks in the order of the attributes, and then computes tokens.

    Attributes:
        swap_out: (block, host block) to copy to host memory; these and the next are places of blocks, see
            ``BlockPool.places``.
        swap_in: (host block, block) to copy back.
        copies: (block, block) to copy before the second is written.
        pinned: cached blocks that are referenced until all copies have been made.
        promotions: (host block, block) to copy from the prefix cache in host memory.
        promoted: (sequence, number of blocks) for each table with blocks that were promoted or swapped in;
            after the copies, this number of its leading blocks is full.
        sequences: the sequences to compute.
        admitted: the first sequences of the new or preempted groups that this step admits.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    promotions: list[tuple[int, int]] = field(default_factory=list)
    promoted: list[tuple[Sequence, int]] = field(default_factory=list)
    sequences: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    @property
    def moves_blocks(self) -> bool:
        """Whether the step copies any block."""
        return bool(self.swap_out or self.swap_in or self.copies or self.promotions)

    def drop_copies_into(self, places: Collection[int]) -> bool:
        """Plan no copy into some blocks, which are given back; return whether there was any."""
        num_before = len(self.swap_in) + len(self.copies)
        for moves in (self.swap_in, self.copies):
            moves[:] = [(source, target) for source, target in moves if target not in places]
        return len(self.swap_in) + len(self.copies) < num_before

    def drop_promotions_into(self, block_ids: Collection[int]) -> list[int]:
        """Plan no promotion into some blocks, which are given back; return the host blocks of those."""
        dropped = [host_id for host_id, block_id in self.promotions if block_id in block_ids]
        if dropped:
            self.promotions[:] = [each for each in self.promotions if each[1] not in block_ids]
        return dropped

    @property
    def kind(self) -> StepKind:
        """The size of the computation."""
        num_tokens = num_read_tokens = 0
        for sequence, num_scheduled in self.sequences:
            num_tokens += num_scheduled
            num_read_tokens += num_scheduled * (sequence.num_computed_tokens + num_scheduled)
        return StepKind.of(num_tokens, num_read_tokens)

    @property
    def num_swapped_blocks(self) -> int:
        """How many blocks it copies between the pool and the swap space."""
        return len(self.swap_out) + len(self.swap_in)
