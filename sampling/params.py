"""The parameters of a request, and the table of their ranges and fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, get_args

from quire.sampling.parameter import Parameter, ParameterError, Range, check

GREEDY_BELOW = 1e-5
"""Below this temperature the most probable token is taken: logits divided by less would overflow."""

MAX_SEQUENCES = 64
"""Most sequences of one request."""

MIN_BUDGET_BLOCKS = 3
"""Fewest blocks of a KV budget: the one being filled, the newest full one, and one by importance."""

EarlyStopping: TypeAlias = Literal[True, False, "never"]
"""When a beam search ends: see ``BeamParams``."""

_NUM_LOGPROBS = Range(0, 20)
_PENALTY = Range(-2, 2)
_SHARE = Range(0, 1, excludes_low=True)


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of beam search, which looks for the most probable answers, as in transformers.

    Attributes:
        width: number of beams, and of answers.
        length_penalty: an answer's score is its logprob divided by its length to this power. A length to a
            higher power could overflow.
        early_stopping: True ends the search once ``width`` answers are finished, False once the current
            beams are unlikely to beat them, "never" once they cannot beat them.

    Raises:
        ParameterError: a value is outside its range.
    """

    width: Annotated[int, Parameter("sampling.beam.width", Range(2, MAX_SEQUENCES))]
    length_penalty: Annotated[
        float,
        Parameter(
            "sampling.beam.length_penalty",
            Range(-10, 10),
            "A score is a logprob divided by its answer's length to this power; default 1.",
        ),
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        Parameter(
            "sampling.beam.early_stopping",
            help="End with enough answers (true), if better ones are unlikely (false) or impossible (never).",
        ),
    ] = False

    def __post_init__(self) -> None:
        check(self)
        if self.early_stopping not in get_args(EarlyStopping):
            problem = f"must be True, False or 'never'; got {self.early_stopping!r}"
            raise ParameterError("sampling.beam.early_stopping", problem)

    def score(self, logprob: float, length: int) -> float:
        """Return the score of an answer of ``length`` tokens."""
        return logprob / float(length**self.length_penalty)

    def logprob(self, score: float, length: int) -> float:
        """Return the logprob of an answer of ``length`` tokens that has a score."""
        return score * float(length**self.length_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonParams:
    """Parameters that have the same names, types and meanings in the engine and in ``LLM``."""

    n: Annotated[int, Parameter("sampling.n", Range(1, MAX_SEQUENCES))] = 1
    temperature: Annotated[float, Parameter("sampling.temperature", Range(0, 10**6), "0 is greedy.")] = 1.0
    """Divisor of the logits; below ``GREEDY_BELOW`` the most probable token is taken."""
    top_p: Annotated[float, Parameter("sampling.top_p", _SHARE, "Nucleus probability.")] = 1.0
    top_k: Annotated[int, Parameter("sampling.top_k", Range(0), "Keep the k most probable tokens.")] = 0
    min_p: Annotated[
        float,
        Parameter("sampling.min_p", Range(0, 1), "Keep tokens at least this share as probable as the best."),
    ] = 0.0
    typical_p: Annotated[
        float,
        Parameter("sampling.typical_p", _SHARE, "Keep tokens of about average surprise, up to this sum."),
    ] = 1.0
    """Keep the tokens whose negative logprob is nearest to the entropy, up to this sum of probabilities."""
    presence_penalty: Annotated[
        float, Parameter("sampling.presence_penalty", _PENALTY, "Avoid tokens that the answer has.")
    ] = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: Annotated[
        float,
        Parameter("sampling.frequency_penalty", _PENALTY, "Avoid tokens that the answer has often."),
    ] = 0.0
    """Subtracted from a token's logit once for each time that the token occurs in the output."""
    repetition_penalty: Annotated[
        float,
        Parameter(
            "sampling.repetition_penalty", Range(0.01, 100), "Avoid tokens of prompt and answer; 1.1 is mild."
        ),
    ] = 1.0
    """Divides positive logits of tokens in the prompt or output, and multiplies negative ones."""
    min_tokens: Annotated[int, Parameter("stopping.min_tokens", Range(0))] = 0
    ignore_eos: Annotated[bool, Parameter("stopping.ignore_eos")] = False
    kv_budget_tokens: Annotated[int | None, Parameter("sampling.kv_budget_tokens", Range(1))] = None
    """Most tokens whose keys and values are kept after the prompt is computed, at least ``MIN_BUDGET_BLOCKS``
    blocks of them: the answer is an approximation."""


@dataclass(frozen=True, slots=True)
class SamplingParams(CommonParams):
    """How to sample tokens and when to stop: all that the engine needs in addition to tokens and a format.

    Strings that end an answer are not known to the engine; see ``ResponseOptions``. Sample i of ``n``, from
    0, gets the tokens of a request with n=1 and the seed ``seed + i``.

    Raises:
        ParameterError: a value is outside its range, or values contradict each other.
    """

    max_tokens: Annotated[
        int,
        Parameter(
            "stopping.max_tokens", Range(1), "Most tokens to generate; by default up to the model's length."
        ),
    ] = 16
    stop_token_ids: Annotated[frozenset[int], Parameter("stopping.stop_token_ids", max_items=1024)] = (
        frozenset()
    )
    seed: Annotated[int, Parameter("sampling.seed", Range(0, 2**64 - 1), "Same seed, same tokens.")] = 0
    beam: Annotated[BeamParams | None, Parameter("sampling.beam")] = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], Parameter("sampling.logit_bias", Range(-100, 100), max_items=1024)
    ] = ()
    """Pairs of (token id, value to add to its logit), each token at most once."""
    allowed_token_ids: Annotated[frozenset[int], Parameter("sampling.allowed_token_ids")] = frozenset()
    """The only tokens that may be sampled; empty means all."""
    bad_words: Annotated[tuple[tuple[int, ...], ...], Parameter("sampling.bad_word_token_ids")] = ()
    """Token sequences that are never generated; a bad word may begin in the prompt."""
    num_logprobs: Annotated[int | None, Parameter("response.logprobs", _NUM_LOGPROBS)] = None
    """How many most probable tokens to report at each position of the output; None reports nothing."""
    num_prompt_logprobs: Annotated[int | None, Parameter("response.prompt_logprobs", _NUM_LOGPROBS)] = None
    """How many most probable tokens to report at each position of the prompt; None reports nothing."""

    def __post_init__(self) -> None:
        check(self)
        if self.min_tokens > self.max_tokens:
            problem = f"must be from 0 to max_tokens = {self.max_tokens}; got {self.min_tokens}"
            raise ParameterError("stopping.min_tokens", problem)
        if self.beam is not None and self.n > 1:
            problem = f"must be 1 with sampling.beam, which has its width; got {self.n}"
            raise ParameterError("sampling.n", problem)
        if self.beam is not None and self.kv_budget_tokens is not None:
            problem = "must be absent with sampling.beam, which is exact"
            raise ParameterError("sampling.kv_budget_tokens", problem)
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ParameterError("sampling.logit_bias", "must name each token at most once")
        if not all(self.bad_words):
            raise ParameterError("sampling.bad_word_token_ids", "must not be empty")

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


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How a client gets the sampled tokens: which answers, and in what form.

    Raises:
        ParameterError: a value is outside its range.
    """

    best_of: Annotated[int | None, Parameter("sampling.best_of", Range(1, MAX_SEQUENCES))] = None
    """Number of answers to sample. The most probable ones are returned; None returns all."""
    stop_strings: Annotated[tuple[str, ...], Parameter("stopping.stop_strings", max_items=16)] = ()
    """Strings that end an answer."""
    keep_stop_string: Annotated[bool, Parameter("response.keep_stop_string")] = False
    keep_special_tokens: Annotated[bool, Parameter("response.keep_special_tokens")] = False
    logprobs: Annotated[int | None, Parameter("response.logprobs", _NUM_LOGPROBS)] = None
    """How many most probable tokens to return at each position of an answer; None returns nothing."""
    prompt_logprobs: Annotated[int | None, Parameter("response.prompt_logprobs", _NUM_LOGPROBS)] = None
    prompt_token_ids: Annotated[bool, Parameter("response.prompt_token_ids")] = False

    def __post_init__(self) -> None:
        check(self)


def check_best_of(num_answers: int, best_of: int) -> None:
    """Check that at least as many answers are sampled as are returned.

    Raises:
        ParameterError: ``best_of`` is less than the number of answers.
    """
    if not num_answers <= best_of <= MAX_SEQUENCES:
        problem = f"must be from n = {num_answers} to {MAX_SEQUENCES}; got {best_of}"
        raise ParameterError("sampling.best_of", problem, str(MAX_SEQUENCES))
