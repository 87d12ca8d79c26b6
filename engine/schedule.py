"""What one step does: the blocks that it moves, and the tokens that it computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.engine.sequence import Sequence
from quire.engine.step_watch import StepKind

if TYPE_CHECKING:
    from quire.engine.sequence_group import SequenceGroup


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its tokens this step computes, including its draft tokens."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def num_sampled_rows(self) -> int:
        """Rows of logits to sample from: one after its last token and one after each draft token."""
        return 1 + len(self.sequence.draft_token_ids)


@dataclass(slots=True)
class Schedule:
    """What one step does: it moves blocks, in the order of the attributes, and then computes tokens.

    Attributes:
        swap_out: (block, host block) to copy to host memory.
        swap_in: (host block, block) to copy back.
        copies: (block, block) to copy before the second is written.
        pinned: cached blocks that are referenced until all copies have been made.
        promotions: (host block, block) to copy from the prefix cache in host memory.
        promoted: (sequence, number of blocks) for each table that gets promoted blocks: that many of its
            leading blocks are full after the copies.
        sequences: the sequences to compute.
        admitted: the groups among them that were waiting before, whether new or preempted.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    promotions: list[tuple[int, int]] = field(default_factory=list)
    promoted: list[tuple[Sequence, int]] = field(default_factory=list)
    sequences: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[SequenceGroup] = field(default_factory=list)

    @property
    def moves_blocks(self) -> bool:
        """Whether the step copies any block."""
        return bool(self.swap_out or self.swap_in or self.copies or self.promotions)

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
