"""A sequence: its tokens, its block table and how far it has been computed.

::

    token_ids   [ prompt ............................ | output ...... ]
                [ num_cached_tokens | computed ... | scheduled | ... ]
                  found in the pool                  this step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from quire.engine.logits_processing import LogitsRules
from quire.engine.sampling_params import SamplingParams

NO_BLOCK = -1
"""Stands in a block table for a block that was given back, since no later token looks at it."""

HashBlock = Callable[[bytes, list[int]], bytes]
"""Returns the hash of a full block from its parent's hash and its tokens."""


class SequenceStatus(IntEnum):
    """Where a sequence is in its life; everything from FINISHED_STOPPED on is an end."""

    WAITING = 0
    PREFILLING = 1
    TRANSFERRING = 2
    DECODING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_HANDED_OVER = 7
    FINISHED_ABORTED = 8

    @property
    def is_finished(self) -> bool:
        """Whether no further token will come."""
        return self >= SequenceStatus.FINISHED_STOPPED


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, of the model's own distribution before temperature."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One sequence of tokens and the blocks that hold its keys and values.

    ``token_ids`` may end with tokens that an earlier attempt generated: ``num_prompt_tokens`` says where the
    prompt ends. Positions count from the prompt's start, so a resumed sequence draws the same tokens.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    root_hash: bytes
    stops_after_prefill: bool = False
    """A prefill worker's sequence: it ends with its prompt, and its blocks stay until released."""
    draws_tokens: bool = True
    """False for a prefill worker's part of a request whose tokens are all drawn by the decode worker."""

    index: int = 0
    """Which of its request's sequences it is."""
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_promoted_tokens: int = 0
    """Those of the cached tokens that came back from the tiers below the pool."""
    num_sealed_blocks: int = 0
    num_dropped_blocks: int = 0
    """Places of the block table that hold ``NO_BLOCK``."""
    logits_rules: LogitsRules | None = None
    """What ``params`` asks of the logits; None if nothing."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Those of the prompt's tokens from the second on, as far as computed."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses at the tokens that follow, for one step; never hashed, sealed or reported."""

    queued_at: float = 0.0
    """When it came to the scheduler, by the engine's clock."""
    started_at: float = 0.0
    """When the first step began that computed anything of it."""
    finished_at: float = 0.0
    """When it ended; its blocks may stay until they are released."""

    def __post_init__(self) -> None:
        if self.logits_rules is None and self.params.changes_logits:
            self.logits_rules = LogitsRules(self.params, self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of the table, in order."""
        if not self.num_dropped_blocks:
            return self.block_table
        return [block_id for block_id in self.block_table if block_id != NO_BLOCK]

    @property
    def seed(self) -> int:
        """The seed of this sequence's random numbers."""
        return (self.params.seed + self.index) % 2**64

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens of a held prefix that it may use: logits of cached tokens are gone."""
        limit = self.num_exact_tokens
        if self.params.kv_budget_tokens is not None:
            # Computing the prompt's last token decides what is kept, before any other is computed again.
            limit -= 1
        num_scored = len(self.prompt_logprobs)
        needs_no_more = self.params.num_prompt_logprobs is None or num_scored == self.num_prompt_tokens - 1
        return limit if needs_no_more else min(limit, num_scored)

    @property
    def num_exact_tokens(self) -> int:
        """Tokens whose keys and values are those of any sequence that begins alike.

        With a KV budget, what follows the prompt depends on what was kept.
        """
        return self.num_tokens if self.params.kv_budget_tokens is None else self.num_prompt_tokens

    def max_step_tokens(self, block_size: int) -> int:
        """Return the most tokens that a step may compute.

        With a budget, blocks are given back after the prompt and after each full block: tokens that are
        computed again must see what they saw first.
        """
        num_computed = self.num_computed_tokens
        num_missing = self.num_tokens - num_computed
        if self.params.kv_budget_tokens is None or self.stops_after_prefill:
            return num_missing
        num_left = self.num_prompt_tokens - num_computed
        return num_left if num_left > 0 else min(num_missing, block_size - num_computed % block_size)

    def positions_to_score(self, num_new_tokens: int) -> range:
        """Return which of the next tokens' logits give logprobs of the prompt that are wanted still."""
        if self.params.num_prompt_logprobs is None:
            return range(0)
        end = min(self.num_computed_tokens + num_new_tokens, self.num_prompt_tokens - 1)
        return range(max(self.num_computed_tokens, len(self.prompt_logprobs)), end)

    def extend_hashes(self, block_size: int, hash_block: HashBlock) -> None:
        """Hash every full block of ``token_ids`` that has no hash yet."""
        for index in range(len(self.block_hashes), self.num_tokens // block_size):
            tokens = self.token_ids[index * block_size : (index + 1) * block_size]
            self.block_hashes.append(hash_block(self.parent_hash(index), tokens))

    def parent_hash(self, index: int) -> bytes:
        """Return the hash that the block at ``index`` follows."""
        return self.block_hashes[index - 1] if index else self.root_hash

    def copy(self, index: int) -> Sequence:
        """Return a sequence that has come as far, over the same blocks."""
        return replace(
            self,
            index=index,
            token_ids=self.token_ids[:],
            block_table=self.block_table[:],
            block_hashes=self.block_hashes[:],
            logits_rules=self.logits_rules and self.logits_rules.copy(),
            draft_token_ids=[],
        )


class GeneratedToken(NamedTuple):
    """A new token, and its logprobs if the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class SequenceUpdate(NamedTuple):
    """What one step did for one sequence.

    Attributes:
        score: a beam search's, of an answer.
        num_accepted_tokens: of the tokens, those that were guessed.
    """

    sequence: Sequence
    num_computed_tokens: int
    tokens: list[GeneratedToken]
    status: SequenceStatus
    score: float | None = None
    num_accepted_tokens: int = 0
