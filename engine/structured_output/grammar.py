"""Structured output: computes which tokens a JSON schema, a regular expression or a Lark grammar allows next.

The optional package llguidance compiles each of these formats into a grammar over the tokenizer's vocabulary,
and parses the output token by token. The parser's state depends only on the output, so forking, preempting or
resuming a sequence on another worker does not change its answer.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.errors import RequestFailedError
from quire.engine.structured_output.grammar_check import FormatChecker, FormatCheckError
from quire.engine.structured_output.grammar_compile import (
    BYTES_PER_LEXER_STATE,
    MAX_LEXER_STATES,
    SMALL_LEXER_STATES,
    BadFormatError,
    compile_format,
    first_line,
    load_tokenizer,
)
from quire.sampling.output_format import OutputFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHE_BYTES = 256 << 20
"""Most bytes of compiled formats in a process's cache."""
MAX_REFUSED = 1024
"""Most refused formats that a process remembers, so that it does not try them again."""
MASK_SECONDS = 10.0
"""Most seconds of processor time for the masks of one request: enough for 1,000 slow but usual masks."""

Mask = np.ndarray[tuple[int], np.dtype[np.bool_]]


class StructuredOutputUnavailableError(RuntimeError):
    """This process cannot compile formats; the message says what is missing."""


class FormatFailedError(RequestFailedError):
    """An answer cannot be continued in its format; a retry on another worker would fail too.

    Attributes:
        field: the format's field as the client sent it.
        problem: description of the problem, which follows the field's name in a message.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field
        self.problem = problem

    def __reduce__(self) -> tuple[type[FormatFailedError], tuple[str, str]]:
        """Let another process make the same error, which ``BaseException`` would give only the message."""
        return type(self), (self.field, self.problem)


class CompiledFormat:
    """A compiled format. New answers share its lexer.

    The lexer remembers each state that any answer has reached. At its limit it fails for all answers,
    including those that need few states. Each of them then continues with a lexer of its own, since there
    might be no limit that suffices for all of them together.

    Args:
        output_format: the format.
        num_compiled_bytes: how many bytes it occupies without the states that answers add.
        make: compiles it, with a limit on the lexer's states.

    Attributes:
        first: a matcher at the start of an answer. It is replaced when its lexer is full.
    """

    def __init__(
        self, output_format: OutputFormat, num_compiled_bytes: int, make: Callable[[int], LLMatcher]
    ) -> None:
        self.output_format = output_format
        self._num_compiled_bytes = num_compiled_bytes
        self._make = make
        self._max_lexer_states = SMALL_LEXER_STATES
        try:
            self.first = make(SMALL_LEXER_STATES)
        except BadFormatError:
            # A choice of thousands of words needs more states for its first mask.
            self._replace_first()

    @property
    def num_bytes(self) -> int:
        """Most bytes that the format occupies while its lexer is not replaced."""
        return self._num_compiled_bytes + self._max_lexer_states * BYTES_PER_LEXER_STATE

    def restart(self, first: LLMatcher) -> LLMatcher | None:
        """Return a matcher at the start whose lexer is new; None if the lexer of ``first`` is not full."""
        matcher = first.deep_copy()
        matcher.compute_bitmask()
        if not matcher.is_error():
            return None
        if self.first is first:
            self._replace_first()
        return self._make(MAX_LEXER_STATES)

    def _replace_first(self) -> None:
        self.first = self._make(MAX_LEXER_STATES)
        self._max_lexer_states = MAX_LEXER_STATES


@dataclass(slots=True)
class MaskTime:
    """Processor time in seconds that the masks of all sequences of one request have taken."""

    seconds: float = 0.0


class GrammarMatcher:
    """Follows one sequence's output through a compiled format, from the end of its prompt.

    Args:
        compiled: the format.
        num_prompt_tokens: number of leading tokens to which the format does not apply.
        vocab_size: size of the model's logits.
        ends: tokens that end a complete answer.
    """

    def __init__(
        self, compiled: CompiledFormat, num_prompt_tokens: int, vocab_size: int, ends: list[int]
    ) -> None:
        self._compiled = compiled
        self._first = compiled.first
        """A matcher at the start of an answer, with the lexer of ``_matcher``."""
        self._matcher = self._first.deep_copy()
        self._num_prompt_tokens = num_prompt_tokens
        self._num_followed = num_prompt_tokens
        self._time = MaskTime()
        self._vocab_size = vocab_size
        self._ends = ends

    def allowed(self, token_ids: list[int]) -> Mask:
        """Return the boolean mask ``[vocab_size]`` of tokens that may follow.

        Args:
            token_ids: prompt and output. Between two calls, tokens may only be appended.

        Raises:
            FormatFailedError: the format is too complex, or the answer does not match it.
        """
        begin = thread_time()
        mask = self._follow(token_ids, self._num_followed)
        if self._matcher.is_error() and (fresh := self._compiled.restart(self._first)) is not None:
            self._first, self._matcher = fresh, fresh.deep_copy()
            mask = self._follow(token_ids, self._num_prompt_tokens)
        self._num_followed = len(token_ids)
        self._time.seconds += thread_time() - begin
        if self._matcher.is_error():
            raise self._failed(len(token_ids), first_line(self._matcher.get_error()))
        if self._time.seconds > MASK_SECONDS:
            raise self._failed(len(token_ids), f"its masks took more than {MASK_SECONDS:g} s")
        return mask

    def _follow(self, token_ids: list[int], start: int) -> Mask:
        """Parse the tokens from ``start`` on; return the mask of tokens that may follow.

        In case of an error the mask has no meaning.
        """
        for token_id in token_ids[start:]:
            # A complete output stops the parser. With min_tokens, further tokens may still be sampled.
            if self._matcher.is_stopped():
                break
            self._matcher.consume_token(token_id)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            return np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        mask[self._ends] = True
        return mask

    def _failed(self, num_tokens: int, reason: str) -> FormatFailedError:
        num_written = num_tokens - self._num_prompt_tokens
        return FormatFailedError(
            f"format.{self._compiled.output_format.kind}",
            f"cannot be continued after {num_written} tokens of the answer: {reason}",
        )

    def begin_time(self) -> None:
        """Count the time of its further masks separately, not for the request."""
        self._time = MaskTime()

    def copy(self) -> GrammarMatcher:
        """Return an independent copy of the matcher, which shares the request's mask time."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other


class GrammarCompiler:
    """Compiles formats for one model; safe to call from any thread.

    A new format is first tried in another process (``grammar_check``). Accepted formats are cached while
    there is room, and refused formats are remembered, so a format is usually tried only once.

    Args:
        read_tokenizer: returns the text of the model's ``tokenizer.json``; called when first needed.
        vocab_size: size of the model's logits.
        eos_token_ids: tokens that end a complete answer.

    Attributes:
        checker: tries each new format in another process.
    """

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(eos_token_ids)
        self.checker = FormatChecker(self._setup)
        self._compiling = threading.Lock()
        self._known = threading.Lock()
        """Lock of the two caches, which is held only briefly."""
        self._compiled: OrderedDict[bytes, CompiledFormat] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    @property
    def num_cached_bytes(self) -> int:
        """Sum of the sizes of the cached formats, each with the lexer states that it may still get."""
        return sum(each.num_bytes for each in self._compiled.values())

    def compile(self, output_format: OutputFormat, num_prompt_tokens: int) -> GrammarMatcher:
        """Return a matcher for a new sequence. This may take seconds if the format is not cached.

        Raises:
            BadFormatError: the format is not valid, or takes too much time or memory.
            StructuredOutputUnavailableError: llguidance is not installed, or cannot be used with the model.
        """
        matcher = self.cached_matcher(output_format, num_prompt_tokens)
        if matcher is not None:
            return matcher
        with self._compiling:
            if (matcher := self.cached_matcher(output_format, num_prompt_tokens)) is None:
                matcher = self._start(self._compile(output_format), num_prompt_tokens)
        return matcher

    def cached_matcher(self, output_format: OutputFormat, num_prompt_tokens: int) -> GrammarMatcher | None:
        """Return a matcher for a new sequence if the format is cached, else None. This never blocks for long.

        Raises:
            BadFormatError: the format was refused before.
        """
        key = _key(output_format)
        with self._known:
            if (problem := self._refused.get(key)) is not None:
                raise BadFormatError(problem)
            if (compiled := self._compiled.get(key)) is None:
                return None
            self._compiled.move_to_end(key)
            # Since the last call, formats may have got larger lexers.
            self._evict()
        return self._start(compiled, num_prompt_tokens)

    def close(self) -> None:
        """End the process that tries formats."""
        self.checker.close()

    def _start(self, compiled: CompiledFormat, num_prompt_tokens: int) -> GrammarMatcher:
        return GrammarMatcher(compiled, num_prompt_tokens, self._vocab_size, self._ends)

    def _compile(self, output_format: OutputFormat) -> CompiledFormat:
        tokenizer, key = self._tokenizer, _key(output_format)
        try:
            num_bytes = self.checker.check(output_format)
            compiled = CompiledFormat(
                output_format, num_bytes, partial(compile_format, tokenizer, output_format)
            )
        except BadFormatError as error:
            with self._known:
                self._refused[key] = str(error)
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise
        except FormatCheckError as error:
            raise StructuredOutputUnavailableError(str(error)) from error
        with self._known:
            self._compiled[key] = compiled
            self._evict()
        return compiled

    def _evict(self) -> None:
        """Keep the formats that were used last. Another answer may still follow a format that is not kept."""
        while self.num_cached_bytes > CACHE_BYTES and len(self._compiled) > 1:
            self._compiled.popitem(last=False)

    def _setup(self) -> tuple[str, int, list[int]]:
        return self._read_tokenizer(), self._vocab_size, self._ends

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        # The tokenizer is loaded on first use: the package is optional, and most workers never need it.
        if not self._ends:
            raise StructuredOutputUnavailableError("structured output needs a model that can end an answer")
        try:
            return load_tokenizer(*self._setup())
        except ImportError as error:
            raise StructuredOutputUnavailableError(
                "structured output needs the extra 'structured' on every worker: "
                "in quire's clone, run .venv/bin/pip install -e '.[structured]'"
            ) from error


def _key(output_format: OutputFormat) -> bytes:
    return hashlib.sha256("\n".join(astuple(output_format)).encode(errors="surrogatepass")).digest()
