"""Structured output: which tokens a JSON schema, a regular expression or a grammar allows next.

llguidance, an optional package, compiles a format against the tokenizer's vocabulary and parses the output
token by token. The parser's state follows from the output alone, so a sequence that was forked, preempted or
resumed elsewhere goes on as it would have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

CACHE_SIZE = 64
"""Compiled formats that a worker keeps."""

_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": " ?"}
"""A model could else spend its tokens on blanks; a schema's ``x-guidance`` may say otherwise."""

logger = logging.getLogger(__name__)
Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class OutputFormat(NamedTuple):
    """A JSON schema, a regular expression that the whole answer matches, or a grammar in Lark's notation."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str


class BadFormatError(ValueError):
    """A format that cannot be compiled, in the compiler's words, or that no answer has."""


class StructuredOutputUnavailableError(RuntimeError):
    """This worker cannot compile formats; the message says what it lacks."""


class GrammarMatcher:
    """Follows one sequence's output through a compiled format.

    A format that proves too complex half-way, or an output that has left it, allows end-of-sequence tokens
    alone: the answer ends there, and the log has the reason.
    """

    def __init__(self, matcher: LLMatcher, num_prompt_tokens: int, vocab_size: int, ends: list[int]) -> None:
        self._matcher = matcher
        self._num_followed = num_prompt_tokens
        self._vocab_size = vocab_size
        self._ends = ends

    def allowed(self, token_ids: list[int]) -> Mask:
        """Return which tokens may follow a sequence, ``[vocab_size]``; it only ever grows between calls."""
        # A complete output has stopped the parser; min_tokens may draw further end-of-sequence tokens.
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(token_ids[self._num_followed :])
        self._num_followed = len(token_ids)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if not self._matcher.is_error():
                unpacked = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
                return unpacked.astype(np.bool_)
        if self._matcher.is_error():
            logger.warning("a structured answer ends early: %s", self._matcher.get_error().split("\n", 1)[0])
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._ends] = True
        return mask

    def copy(self) -> GrammarMatcher:
        """Return a matcher that goes its own way from here."""
        return GrammarMatcher(self._matcher.deep_copy(), self._num_followed, self._vocab_size, self._ends)


class GrammarCompiler:
    """Compiles formats for one model; safe to call from any thread.

    Args:
        read_tokenizer: returns the text of the model's ``tokenizer.json``; called once, when first needed.
        vocab_size: size of the model's logits.
        eos_token_ids: tokens that end a complete answer.
    """

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(eos_token_ids)
        self._cached_matcher = lru_cache(CACHE_SIZE)(self._compile)

    def compile(self, output_format: OutputFormat, num_prompt_tokens: int) -> GrammarMatcher:
        """Return a matcher for a new sequence; it may take seconds.

        Raises:
            BadFormatError: the format is not valid.
            StructuredOutputUnavailableError: llguidance is not installed, or cannot be used with the model.
        """
        matcher = self._cached_matcher(output_format).deep_copy()
        return GrammarMatcher(matcher, num_prompt_tokens, self._vocab_size, self._ends)

    def _compile(self, output_format: OutputFormat) -> LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher

        read: dict[str, Callable[[str], str]] = {
            "json_schema": partial(LLMatcher.grammar_from_json_schema, defaults=_JSON_DEFAULTS),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        try:
            grammar = read[output_format.kind](output_format.text)
        except ValueError as error:
            raise BadFormatError(str(error)) from error
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise BadFormatError(matcher.get_error().strip())
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise BadFormatError("no answer has this form, not even an empty one")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        # Imported late: the package is optional, and most workers never need it.
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise StructuredOutputUnavailableError(
                "structured output needs llguidance on every worker: pip install quire[structured]"
            ) from error
        if not self._ends:
            raise StructuredOutputUnavailableError("structured output needs a model that can end an answer")
        return LLTokenizer(self._read_tokenizer(), n_vocab=self._vocab_size, eos_token=self._ends)
