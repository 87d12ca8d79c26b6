"""A sequence: its tokens, its block table and how far it has been computed.

::

    token_ids   [ prompt ............................ | output ...... ]
                [ num_cached_tokens | computed ... | scheduled | ... ]
                  found in the pool                  this step
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

from quire.engine.logits_processing import LogitsRules

NO_BLOCK = -1
"""Stands in a block table for a block that was given back, since no later token looks at it."""

HashBlock = Callable[[bytes, list[int]], bytes]
"""Returns the hash of a full block from its parent's hash and its tokens."""


MAX_SEQUENCES = 64
"""Most sequences of one request."""

MAX_LOGIT_BIASES = 1024
"""Most tokens with a bias of one request."""

GREEDY_BELOW = 1e-5
"""Lower temperatures take the most probable token: logits divided by them would overflow."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01 - 1e-9, 100.0
"""Beyond, penalized logits overflow; 0.01 in single precision is a little less."""


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


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search for the most probable answers instead of drawing them; as in transformers.

    Attributes:
        width: beams, and answers.
        length_penalty: an answer's score is its logprob divided by its length to this power.
        early_stopping: True ends with ``width`` finished answers, False when the present beams are unlikely
            to beat them, "never" when they cannot.

    Raises:
        ValueError: a value is outside its range; the message names the field and the limit.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MAX_SEQUENCES:
            raise ValueError(f"beam.width must be from 2 to {MAX_SEQUENCES}, got {self.width}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"beam.length_penalty must be finite, got {self.length_penalty}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"beam.early_stopping must be true, false or never, got {self.early_stopping}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to stop.

    Of ``n`` samples, number i draws what a request alone would draw with the seed ``seed + i``.

    Raises:
        ValueError: a value is outside its range; the message names the field and the limit.
    """

    temperature: float = 1.0
    """Of less than ``GREEDY_BELOW``, the most probable token is taken."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    n: int = 1
    beam: BeamParams | None = None
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that the output has it."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that the prompt or the output has; negative ones are multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, bias), each token once."""
    allowed_token_ids: frozenset[int] = frozenset()
    """The only tokens that may be drawn; empty means all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Tokens in a row that are never drawn; a bad word may begin in the prompt."""
    num_prompt_logprobs: int | None = None
    """How many of the most probable tokens to report at each position of the prompt; None reports nothing."""
    kv_budget_tokens: int | None = None
    """Most tokens whose keys and values are kept once the prompt is computed: an approximation."""

    def __post_init__(self) -> None:
        in_range = {
            "temperature": 0.0 <= self.temperature < float("inf"),
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "seed": 0 <= self.seed < 2**64,
            "max_tokens": self.max_tokens >= 1,
            "min_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "num_logprobs": self.num_logprobs is None or 0 <= self.num_logprobs <= 20,
            "n": 1 <= self.n <= MAX_SEQUENCES and (self.n == 1 or self.beam is None),
            "presence_penalty": -2.0 <= self.presence_penalty <= 2.0,
            "frequency_penalty": -2.0 <= self.frequency_penalty <= 2.0,
            "repetition_penalty": MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            "logit_bias": len(self.logit_bias) <= MAX_LOGIT_BIASES
            and len(dict(self.logit_bias)) == len(self.logit_bias)
            and all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias),
            "bad_words": all(self.bad_words),
            "kv_budget_tokens": self.kv_budget_tokens is None
            or (self.kv_budget_tokens >= 1 and self.beam is None),
            "num_prompt_logprobs": self.num_prompt_logprobs is None or 0 <= self.num_prompt_logprobs <= 20,
        }
        for name, is_good in in_range.items():
            if not is_good:
                raise ValueError(f"{name} is out of range: {getattr(self, name)}")

    @property
    def is_penalized(self) -> bool:
        """Whether tokens that occurred become less probable, or more."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether a token is drawn from anything but the model's own logits."""
        return bool(
            self.is_penalized
            or self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """Sequences that decode side by side."""
        return self.beam.width if self.beam else self.n


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
