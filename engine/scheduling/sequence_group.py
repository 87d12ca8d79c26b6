"""The sequences of one request, which are scheduled together.

PagedAttention (Kwon et al., SOSP 2023) calls them a sequence group. The sequences share blocks, so they are
admitted, preempted and resumed together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.kv_cache.tiers import Prefetch
from quire.engine.sequences.beam_search import BeamExtension, BeamSearch
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import NO_BLOCK, ScheduledSequence, Sequence, SequenceStatus
from quire.sampling.params import SamplingParams


class SwappedTables(NamedTuple):
    """Where a preempted group's blocks are in host memory.

    Attributes:
        host_ids: host blocks of all its blocks, each once.
        tables: for each sequence, the index in ``host_ids`` of each block, or NO_BLOCK. Shared blocks have
            equal indices, so they are shared again after the swap.
    """

    host_ids: list[int]
    tables: list[list[int]]


class Arrival(NamedTuple):
    """A position in the order of arrival.

    Attributes:
        seconds: when the request arrived, plus its patience.
        number: how many had arrived then; it orders equal times.
    """

    seconds: float
    number: int


NOT_ARRIVED = Arrival(0.0, 0)


class Lack(NamedTuple):
    """Why a group could not begin.

    Attributes:
        num_blocks: blocks that it would have taken from the pool, including those of its cached prefix.
        next_hash: a list with the hash of the first block after the cached prefix. Once that block is cached,
            the group needs fewer blocks. The list is empty if no block can help.
    """

    num_blocks: int
    next_hash: list[bytes]


@dataclass(eq=False, slots=True)
class SequenceGroup:
    """A request: a single sequence until the prompt is computed, and then ``params.num_sequences`` of them.

    Attributes:
        prompt: the first sequence, which the others are forked from.
        sequences: the sequences that have not ended, or the sequence of a finished prefill.
        beam: the state of a beam search.
        arrival: position in the order of arrival; the newest group is preempted first.
        swapped: where the blocks are while they are in host memory.
        prefetch: blocks of its prompt that are read from disk, or have been read.
        lack: why the latest attempt to begin it failed.
        awaited: index of the block that another sequence was computing at that time; None if it waited for no
            block.
        is_forked: whether its samples or beams have been made from the prompt.
        num_preemptions: how often it has been preempted.
        turn: number of the latest divided step that computed it (``fair_turns.py``).
        next_token: one token of the first sequence: most steps compute exactly this for a plain request.
    """

    prompt: Sequence
    sequences: list[Sequence]
    beam: BeamSearch | None = None
    arrival: Arrival = NOT_ARRIVED
    swapped: SwappedTables | None = None
    prefetch: Prefetch | None = None
    lack: Lack | None = None
    awaited: int | None = None
    is_forked: bool = field(default=False)
    num_preemptions: int = 0
    turn: int = 0
    next_token: ScheduledSequence = field(init=False)

    def __post_init__(self) -> None:
        self.next_token = ScheduledSequence(self.prompt, 1)

    @property
    def attempt_id(self) -> str:
        """Id of the request."""
        return self.prompt.attempt_id

    @property
    def client(self) -> str:
        """The client that sent the request."""
        return self.prompt.client

    @property
    def weight(self) -> int:
        """The client's weight."""
        return self.prompt.weight

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return self.prompt.params

    @property
    def num_slots(self) -> int:
        """Most sequences that it may have in a batch."""
        # A beam search may have fewer beams for a while, if few tokens are allowed, and all of them later.
        is_fixed = self.is_forked and self.beam is None
        return len(self.sequences) if is_fixed else self.params.num_sequences

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that are not computed yet."""
        return sum(s.num_tokens - s.num_computed_tokens for s in self.sequences)

    @property
    def holds_blocks(self) -> bool:
        """Whether any sequence has a block of the pool."""
        return any(s.block_table for s in self.sequences)

    @property
    def num_held_blocks(self) -> int:
        """Number of its blocks; a block that several of its sequences share counts once."""
        first, *others = self.sequences
        if not others:
            return len(first.block_table) - first.num_dropped_blocks
        held = {block_id for sequence in self.sequences for block_id in sequence.block_table}
        return len(held - {NO_BLOCK})

    @property
    def is_loading(self) -> bool:
        """Whether blocks of its prompt are still read from disk."""
        return self.prefetch is not None and not self.prefetch.is_done

    @property
    def is_preemptible(self) -> bool:
        """Whether its blocks can be taken. On a prefill worker, a transfer may be reading them."""
        return self.holds_blocks and not self.prompt.stops_after_prefill

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens that the next step verifies."""
        return sum(len(s.draft_token_ids) for s in self.sequences)

    def drop_drafts(self) -> None:
        """Remove the draft tokens of all sequences."""
        for sequence in self.sequences:
            sequence.draft_token_ids = []

    def set_status(self, status: SequenceStatus) -> None:
        """Set the status of all sequences."""
        for sequence in self.sequences:
            sequence.status = status

    def fork_samples(self, tables: BlockTables) -> list[Sequence]:
        """Fork the samples of a computed prompt, unless that is done already; return all sequences."""
        if not self.is_forked:
            self.is_forked = True
            self.sequences += [tables.fork(self.prompt, index) for index in range(1, self.params.n)]
        return self.sequences

    def extend_beams(self, extensions: list[BeamExtension], tables: BlockTables) -> None:
        """Replace the beams by the extensions that a step of the beam search has chosen."""
        beams = self.sequences
        self.is_forked = True
        self.sequences = [tables.fork(beams[each.parent], index) for index, each in enumerate(extensions)]
        for beam, extension in zip(self.sequences, extensions, strict=True):
            beam.token_ids.append(extension.token_id)
            beam.status = SequenceStatus.DECODING
        for beam in beams:
            tables.free(beam)
