"""The parameters of requests; names and defaults are those of vLLM."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from quire.llm.structured import StructuredOutputsParams
from quire.sampling import params as engine
from quire.sampling.parameter import ParameterError, table
from quire.sampling.params import EarlyStopping, check_best_of

_ENGINE = table(engine.SamplingParams)
_NO_LIMIT = 1 << 31
"""Number of remaining tokens if the model's length is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(engine.CommonParams):
    """How to sample answers and when to end them.

    Values of ``CommonParams`` mean the same here, except that a ``top_k`` of -1 is off too.

    Attributes:
        best_of: number of answers to sample, of which the ``n`` with the highest cumulative logprobs are
            returned, best first.
        seed: seed of sampling; None chooses a random one.
        stop: strings that end an answer; they are not part of its text.
        include_stop_str_in_output: whether the text ends with the stop string.
        stop_token_ids: tokens that end an answer, as its last token.
        max_tokens: most tokens to generate; None means up to the model's length.
        logprobs: how many of the most probable tokens to report at each position of the answer.
        prompt_logprobs: how many of them to report at each position of the prompt.
        logit_bias: amounts to add to the logits of tokens, by token id.
        allowed_token_ids: the only tokens that may be sampled; empty allows all.
        bad_words: texts that are never generated.
        structured_outputs: the format that the answer must have; needs the extra ``structured``.

    Raises:
        ValueError: a value is outside its range; the message names the field and the limit.
    """

    best_of: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        for name, kinds in _kinds(SamplingParams).items():
            _check_kind(name, getattr(self, name), kinds)
        _ENGINE["n"].parameter.check(self.n)
        if self.best_of is not None:
            check_best_of(self.n, self.best_of)
        # The engine's parameters check their own ranges.
        self.to_engine(_NO_LIMIT, ())
        _check("top_k", self.top_k, self.top_k >= -1, "at least 1, or 0 or -1 for off")
        _check("stop", self.stop, _are_texts(self.stop_strings), "strings that are not empty")
        are_words = _are_texts(self.bad_words) and not any(map(str.isspace, self.bad_words))
        _check("bad_words", self.bad_words, are_words, "texts that are not blank")
        # An answer with a format ends with an end-of-sequence token.
        can_end = self.structured_outputs is None or not self.ignore_eos
        _check("ignore_eos", self.ignore_eos, can_end, "False with structured_outputs")

    @property
    def num_best(self) -> int | None:
        """How many of the sampled answers are returned; None returns all, in the order of their seeds."""
        return self.n if self.best_of is not None and self.best_of > self.n else None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def named_token_ids(self) -> dict[str, Collection[int]]:
        """The token ids in each field that contains token ids."""
        names = ("stop_token_ids", "logit_bias", "allowed_token_ids")
        return {name: getattr(self, name) for name in names}

    def to_engine(self, num_left: int, bad_words: tuple[tuple[int, ...], ...]) -> engine.SamplingParams:
        """Return the engine's parameters for these.

        Args:
            num_left: the model's length minus the prompt's.
            bad_words: the token ids of the bad words.

        Raises:
            ValueError: there is less room than ``min_tokens``.
        """
        max_tokens = num_left if self.max_tokens is None else min(self.max_tokens, num_left)
        is_room = self.min_tokens <= max_tokens or max_tokens == self.max_tokens
        limits = f"at most {num_left}, the model's length less the prompt's"
        _check("min_tokens", self.min_tokens, is_room, limits)
        same = {each.name: getattr(self, each.name) for each in fields(self) if each.name in _ENGINE}
        return engine.SamplingParams(
            **same
            | {
                "n": self.best_of or self.n,
                "top_k": max(0, self.top_k),
                "seed": secrets.randbits(64) if self.seed is None else self.seed,
                "stop_token_ids": frozenset(self.stop_token_ids),
                "max_tokens": max_tokens,
                # ``best_of`` ranks answers by the logprobs of their tokens.
                "num_logprobs": 0 if self.logprobs is None and self.num_best else self.logprobs,
                "num_prompt_logprobs": self.prompt_logprobs,
                "logit_bias": tuple(self.logit_bias.items()),
                "allowed_token_ids": frozenset(self.allowed_token_ids),
                "bad_words": bad_words,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of a beam search.

    Attributes:
        beam_width: number of beams and of answers.
        length_penalty: an answer's score is its logprob divided by its length to this power, from -10 to 10.
        early_stopping: True ends the search with ``beam_width`` finished answers, False when the present
            beams are unlikely to beat them, "never" when the beams cannot beat them.

    Raises:
        ValueError: a value is outside its range; the message names the field and the limit.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        try:
            self.to_engine(self.max_tokens)
        except ParameterError as error:
            name = "beam_width" if error.name == "width" else error.name
            raise ValueError(f"{name} {error.problem}") from error

    def to_engine(self, num_left: int) -> engine.SamplingParams:
        """Return the engine's parameters, for a prompt that leaves room for ``num_left`` tokens."""
        beam = engine.BeamParams(self.beam_width, self.length_penalty, self.early_stopping)
        return engine.SamplingParams(
            temperature=0.0,
            max_tokens=min(self.max_tokens, num_left),
            ignore_eos=self.ignore_eos,
            beam=beam,
        )


@cache
def _kinds(params: type) -> dict[str, frozenset[type]]:
    """Return the types that each field may have."""
    hints = get_type_hints(params).items()
    return {
        name: frozenset(get_args(hint) if get_origin(hint) is UnionType else (hint,)) for name, hint in hints
    }


def _check_kind(name: str, value: Any, kinds: frozenset[type]) -> None:
    """Refuse what Python would take for another number: a fraction for a count, or a text for a bool."""
    if kinds <= {int, NoneType}:
        is_int = isinstance(value, Integral) and not isinstance(value, bool)
        _check(name, value, is_int or (value is None and NoneType in kinds), "a whole number")
    elif kinds == {bool}:
        _check(name, value, isinstance(value, bool), "True or False")


def _are_texts(texts: Any) -> bool:
    # A str is also a sequence of texts, namely of its characters, so refuse it explicitly.
    return not isinstance(texts, str) and all(isinstance(text, str) and text for text in texts)


def _check(name: str, value: Any, is_good: bool, limits: str) -> None:
    if not is_good:
        raise ValueError(f"{name} must be {limits}; got {value!r}")
