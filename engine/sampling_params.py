"""How a request wants its tokens to be chosen, and the limits of each parameter."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.limits import (
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SEQUENCES,
    MAX_TEMPERATURE,
)

GREEDY_BELOW = 1e-5
"""Below this temperature the most probable token is taken: logits divided by less would overflow."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01 - 1e-9, 100.0
"""Range outside which penalized logits overflow; 0.01 in single precision is a little less than 0.01."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of beam search, which looks for the most probable answers, as in transformers.

    Attributes:
        width: number of beams, and of answers.
        length_penalty: an answer's score is its logprob divided by its length to this power.
        early_stopping: True ends the search once ``width`` answers are finished, False once the current
            beams are unlikely to beat them, "never" once they cannot beat them.

    Raises:
        ValueError: a value is outside its range; the message names the field and the limit.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        if not 2 <= self.width <= MAX_SEQUENCES:
            raise ValueError(f"beam.width must be from 2 to {MAX_SEQUENCES}, got {self.width}")
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            limits = f"from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
            raise ValueError(f"beam.length_penalty must be {limits}, got {self.length_penalty}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"beam.early_stopping must be true, false or never, got {self.early_stopping}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample tokens and when to stop.

    Sample i of ``n``, from 0, gets the tokens of a request with n=1 and the seed ``seed + i``.

    Raises:
        ValueError: a value is outside its range; the message names the field and the limit.
    """

    temperature: float = 1.0
    """Divisor of the logits; below ``GREEDY_BELOW`` the most probable token is taken."""
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
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the token occurs in the output."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in the prompt or output, and multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of (token id, value to add to its logit), each token at most once."""
    allowed_token_ids: frozenset[int] = frozenset()
    """The only tokens that may be sampled; empty means all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are never generated; a bad word may begin in the prompt."""
    num_prompt_logprobs: int | None = None
    """How many most probable tokens to report at each position of the prompt; None reports nothing."""
    kv_budget_tokens: int | None = None
    """Most tokens whose keys and values are kept after the prompt is computed: an approximation."""

    def __post_init__(self) -> None:
        in_range = {
            "temperature": 0.0 <= self.temperature <= MAX_TEMPERATURE,
            "top_p": 0.0 < self.top_p <= 1.0,
            "top_k": self.top_k >= 0,
            "min_p": 0.0 <= self.min_p <= 1.0,
            "seed": 0 <= self.seed < 2**64,
            "max_tokens": self.max_tokens >= 1,
            "min_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "num_logprobs": self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_LOGPROBS,
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
            "num_prompt_logprobs": self.num_prompt_logprobs is None
            or 0 <= self.num_prompt_logprobs <= MAX_LOGPROBS,
        }
        for name, is_good in in_range.items():
            if not is_good:
                raise ValueError(f"{name} is out of range: {getattr(self, name)}")

    @property
    def is_penalized(self) -> bool:
        """Whether any penalty changes the logits of tokens that have occurred."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """Whether a penalty, bias or constraint changes the model's logits."""
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
        """Number of sequences that decode at the same time."""
        return self.beam.width if self.beam else self.n
