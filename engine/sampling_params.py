"""What a request asks of the choice of its tokens, and within which limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SEQUENCES = 64
"""Most sequences of one request."""

MAX_LOGIT_BIASES = 1024
"""Most tokens with a bias of one request."""

GREEDY_BELOW = 1e-5
"""Lower temperatures take the most probable token: logits divided by them would overflow."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01 - 1e-9, 100.0
"""Beyond, penalized logits overflow; 0.01 in single precision is a little less."""


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
