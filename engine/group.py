"""The sequences of one request, which live and die together.

PagedAttention (Kwon et al., SOSP 2023) calls it a sequence group: its sequences share blocks, so they are
admitted, preempted and resumed all at once. There are three operations: ``fork`` gives a new sequence the
blocks of an old one, ``append`` (in the scheduler) gives a sequence room for more tokens, and copies a shared
block before it is written, ``free`` takes a sequence's blocks away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.beam_search import BeamExtension, BeamSearch
from quire.engine.block_pool import BlockPool
from quire.engine.cache_tiers import Prefetch
from quire.engine.sampling_params import SamplingParams
from quire.engine.sequence import Sequence, SequenceStatus


class SwappedTables(NamedTuple):
    """Where a preempted group's blocks are in host memory.

    Attributes:
        host_ids: all blocks, each once.
        tables: the place in ``host_ids`` of each block of each sequence, or NO_BLOCK: sharing survives.
    """

    host_ids: list[int]
    tables: list[list[int]]


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """A request: one sequence, the prompt, that becomes ``params.num_sequences`` when it has been computed.

    Attributes:
        sequences: those that have not ended, and a finished prefill's.
        beam: the state of a beam search.
        arrival: place in the order of arrival; the newest is preempted first.
        swapped: where the blocks are, if they are in host memory.
        prefetch: blocks of its prompt that are, or were, read from disk.
    """

    prompt: Sequence
    sequences: list[Sequence]
    beam: BeamSearch | None = None
    arrival: int = 0
    swapped: SwappedTables | None = None
    prefetch: Prefetch | None = None
    is_forked: bool = field(default=False)

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.prompt.request_id

    @property
    def params(self) -> SamplingParams:
        """How the request's tokens are drawn."""
        return self.prompt.params

    @property
    def num_slots(self) -> int:
        """Sequences that it may have in a batch."""
        # A search whose beams have become few, since few tokens are allowed, may have all of them again.
        is_fixed = self.is_forked and self.beam is None
        return len(self.sequences) if is_fixed else self.params.num_sequences

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that steps to come must compute."""
        return sum(s.num_tokens - s.num_computed_tokens for s in self.sequences)

    @property
    def holds_blocks(self) -> bool:
        """Whether any sequence has a block of the pool."""
        return any(s.block_table for s in self.sequences)

    @property
    def is_preemptible(self) -> bool:
        """Whether its blocks can be taken: those of a finished prefill are on their way to another worker."""
        return self.holds_blocks and not self.prompt.stops_after_prefill

    @property
    def num_drafted_tokens(self) -> int:
        """Guesses that the next step is to verify."""
        return sum(len(s.draft_token_ids) for s in self.sequences)

    def drop_drafts(self) -> None:
        """Forget the guesses of all sequences."""
        for sequence in self.sequences:
            sequence.draft_token_ids = []

    def set_status(self, status: SequenceStatus) -> None:
        """Set the status of all sequences."""
        for sequence in self.sequences:
            sequence.status = status

    def fork(self, parent: Sequence, index: int, pool: BlockPool) -> Sequence:
        """Return a new sequence that shares all blocks of ``parent``."""
        child = parent.copy(index)
        pool.share(child.held_blocks)
        return child

    def free(self, sequence: Sequence, pool: BlockPool) -> None:
        """Give a sequence's blocks back; what is full stays cached."""
        pool.free(sequence.held_blocks)
        sequence.block_table.clear()

    def fork_samples(self, pool: BlockPool) -> list[Sequence]:
        """Make the samples of a computed prompt, once; return all sequences."""
        if not self.is_forked:
            self.is_forked = True
            self.sequences += [self.fork(self.prompt, index, pool) for index in range(1, self.params.n)]
        return self.sequences

    def extend_beams(self, extensions: list[BeamExtension], pool: BlockPool) -> None:
        """Replace the beams by those that a step of their search has chosen."""
        beams = self.sequences
        self.is_forked = True
        self.sequences = [self.fork(beams[each.parent], index, pool) for index, each in enumerate(extensions)]
        for beam, extension in zip(self.sequences, extensions, strict=True):
            beam.token_ids.append(extension.token_id)
            beam.status = SequenceStatus.DECODING
        for beam in beams:
            self.free(beam, pool)
