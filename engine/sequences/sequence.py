"""A sequence: its tokens, its block table and how far it has been computed.

::

    token_ids   [ prompt ............................ | output ...... ]
                [ num_cached_tokens | computed ... | scheduled | ... ]
                  found in the pool                  this step
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from quire.engine.errors import RequestFailedError
from quire.engine.sequences.pooling import PooledPrompt
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.kernels.metadata import Adapter
from quire.kvindex.block_hash import block_hash
from quire.sampling.params import SamplingParams

NO_BLOCK = -1
"""Entry of a block table for a block that was freed, since no later token attends to it."""


class SequenceStatus(IntEnum):
    """State of a sequence; FINISHED_STOPPED and all states after it are final."""

    WAITING = 0
    PREFILLING = 1
    TRANSFERRING = 2
    DECODING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_HANDED_OVER = 7
    FINISHED_ABORTED = 8
    FINISHED_FAILED = 9

    @property
    def is_finished(self) -> bool:
        """Whether the state is final, so that the sequence gets no more tokens."""
        return self >= SequenceStatus.FINISHED_STOPPED


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the model's own distribution before temperature."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Tally:
    """Number of tokens that the engine has generated for a request, including those of discarded beams."""

    num_generated_tokens: int = 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One sequence of tokens and the blocks that hold its keys and values.

    ``token_ids`` may end with tokens that an earlier attempt generated: ``num_prompt_tokens`` says where the
    prompt ends. Positions count from the prompt's start, so a resumed sequence samples the same tokens.
    """

    attempt_id: str
    """Unique in the engine: each attempt of a request has another id."""
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    root_hash: bytes
    client: str = ""
    """The client that sent the request. Clients share the steps fairly."""
    weight: int = 1
    """The client's weight: its part of the steps is proportional to it."""
    num_waiting_tokens: int = 0
    """Prompt tokens of the client's requests that waited elsewhere when this one was sent here."""
    patience: float = 0.0
    """Seconds that move the request back in the order of arrival; see ``fairness/patience.py``."""
    adapter: Adapter | None = None
    """The adapter that computes it; its digest must be part of ``root_hash``. None: the model alone."""
    stops_after_prefill: bool = False
    """True on a prefill worker: the sequence ends with its prompt, but keeps its blocks until released."""
    samples_tokens: bool = True
    """False on a prefill worker if the decode worker samples all tokens of the request, or if none is."""

    is_plain: bool = False
    """Whether each step of the request only samples one token from the model's logits.

    The engine sets this for a request without beam search, several samples, prompt logprobs, KV budget or
    hand-over to another worker.
    """

    index: int = 0
    """Index among the sequences of its request, from 0."""
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_promoted_tokens: int = 0
    """Cached tokens from the tiers below the pool; ``num_cached_tokens`` includes them."""
    num_sealed_blocks: int = 0
    num_dropped_blocks: int = 0
    """Number of entries of the block table that are ``NO_BLOCK``."""
    num_passed_blocks: int = 0
    """Number of leading blocks that the window of some layers has left behind, although others see them."""
    num_table_edits: int = 0
    """Number of changes to the block table, except for blocks added at its end."""
    logits_rules: LogitsRules | None = None
    """Changes to the logits that ``params`` asks for; None if there are none."""
    draw: bytes = field(default=b"", init=False)
    """The sampler's encoded parameters for its tokens; empty before the first token."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Logprobs of the prompt's tokens from the second on, as far as they are computed."""
    pooled: PooledPrompt | None = None
    """Its embedding, as far as it is computed; the sequence then samples no token. None if none is wanted."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Draft tokens that one step verifies; they are never hashed, sealed or reported."""
    tally: Tally = field(default_factory=Tally)
    """Shared by all sequences of the request."""

    queued_at: float = 0.0
    """Time when it was queued in the scheduler, in seconds of the engine's clock."""
    started_at: float = 0.0
    """Time when the first step began that computed any of its tokens."""
    finished_at: float = 0.0
    """Time when it ended; its blocks may stay until they are released."""

    def __post_init__(self) -> None:
        if self.logits_rules is None and self.params.changes_logits:
            self.logits_rules = LogitsRules(self.params, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens, including those of earlier attempts."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def held_blocks(self) -> list[int]:
        """Block ids of the table in order, without ``NO_BLOCK``."""
        if not self.num_dropped_blocks:
            return self.block_table
        # A window drops the first blocks, so the rest usually has no gaps.
        rest = self.block_table[self.num_dropped_blocks :]
        if NO_BLOCK not in rest:
            return rest
        return [block_id for block_id in self.block_table if block_id != NO_BLOCK]

    @property
    def seed(self) -> int:
        """Seed of this sequence's random numbers: the request's seed plus the sequence's index."""
        return (self.params.seed + self.index) % 2**64

    @property
    def kv_budget(self) -> int | None:
        """Most tokens whose keys and values are kept after the prompt; None keeps all."""
        return self.params.kv_budget_tokens

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens of a cached prefix that it may use: cached tokens have no logits or hidden states."""
        limit = self.num_exact_tokens
        if self.kv_budget is not None:
            # The prompt's last token must be computed: after it, and before later tokens are recomputed,
            # eviction chooses the blocks to keep.
            limit -= 1
        if self.pooled is not None and (missing := self.pooled.missing(0, limit)):
            limit = missing.start
        num_scored = len(self.prompt_logprobs)
        needs_no_more = self.params.num_prompt_logprobs is None or num_scored == self.num_prompt_tokens - 1
        return limit if needs_no_more else min(limit, num_scored)

    @property
    def num_exact_tokens(self) -> int:
        """Leading tokens whose keys and values are the same in every sequence with the same prefix.

        With a KV budget these are only the prompt's tokens: later ones depend on which blocks were kept.
        """
        return self.num_tokens if self.kv_budget is None else self.num_prompt_tokens

    def max_step_tokens(self, block_size: int) -> int:
        """Return the most tokens that a step may compute.

        With a KV budget, blocks are freed after the prompt and after each full block. A step must not cross
        these points, since tokens that are recomputed must attend to the same blocks as the first time.
        """
        num_computed = self.num_computed_tokens
        num_missing = self.num_tokens - num_computed
        if self.kv_budget is None or self.stops_after_prefill:
            return num_missing
        num_left = self.num_prompt_tokens - num_computed
        return num_left if num_left > 0 else min(num_missing, block_size - num_computed % block_size)

    def positions_to_score(self, num_new_tokens: int) -> range:
        """Return the positions, among the next tokens, whose logits give missing prompt logprobs."""
        if self.params.num_prompt_logprobs is None:
            return range(0)
        end = min(self.num_computed_tokens + num_new_tokens, self.num_prompt_tokens - 1)
        return range(max(self.num_computed_tokens, len(self.prompt_logprobs)), end)

    def positions_to_pool(self, num_new_tokens: int) -> range:
        """Return the positions among the next tokens whose hidden states are pooled."""
        if self.pooled is None:
            return range(0)
        return self.pooled.missing(self.num_computed_tokens, self.num_computed_tokens + num_new_tokens)

    @property
    def num_transferred_tokens(self) -> int:
        """How many of a request's prompt tokens another worker computes.

        It computes all of them if the request has one sequence, whose first token it also samples. If there
        are several sequences, the decode worker needs the last token's logits and computes that token itself.
        """
        return self.num_tokens if self.params.num_sequences == 1 else self.num_tokens - 1

    def extend_hashes(self, block_size: int) -> None:
        """Hash every full block of ``token_ids`` that has no hash yet."""
        for index in range(len(self.block_hashes), self.num_tokens // block_size):
            tokens = self.token_ids[index * block_size : (index + 1) * block_size]
            self.block_hashes.append(block_hash(self.parent_hash(index), tokens))

    def parent_hash(self, index: int) -> bytes:
        """Return the hash of the block before ``index``; the root hash for index 0."""
        return self.block_hashes[index - 1] if index else self.root_hash

    def copy(self, index: int) -> Sequence:
        """Return a sequence in the same state, with the same block ids; the caller adds the references."""
        return replace(
            self,
            index=index,
            token_ids=self.token_ids[:],
            block_table=self.block_table[:],
            block_hashes=self.block_hashes[:],
            logits_rules=self.logits_rules and self.logits_rules.copy(),
            draft_token_ids=[],
        )


@dataclass(slots=True)
class GeneratedToken:
    """A new token, and its logprobs if the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class SequenceUpdate:
    """What one step did for one sequence.

    Attributes:
        score: score of an answer of a beam search, else None.
        num_accepted_tokens: how many of ``tokens`` were accepted draft tokens.
        error: why the request, with all its sequences, has failed; None if it has not.
    """

    sequence: Sequence
    num_computed_tokens: int
    tokens: list[GeneratedToken]
    status: SequenceStatus
    score: float | None = None
    num_accepted_tokens: int = 0
    error: RequestFailedError | None = None


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its tokens this step computes, including its draft tokens."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def num_sampled_rows(self) -> int:
        """Rows of logits to sample from: one after its last token and one after each draft token."""
        return 1 + len(self.sequence.draft_token_ids)
