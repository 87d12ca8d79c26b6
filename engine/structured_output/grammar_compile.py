"""Compiles the format of an answer with llguidance, under limits on time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from quire.sampling.output_format import Kind, OutputFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_JSON_DEFAULTS: JsonCompileOptions = {"whitespace_pattern": " ?"}
"""Options of JSON schemas, which prevent a model from spending its tokens on blanks.

A schema's ``x-guidance`` may override them.
"""

_MAX_PARSER_ITEMS: Mapping[Kind, tuple[int, int]] = {
    # Each optional property adds four items to one row, and the cost is linear in them.
    "json_schema": (2_000, 20_000),
    "regex": (2_000, 20_000),
    # For an ambiguous grammar, the time grows with the square of a row's items: at these limits a mask takes
    # 3 ms. A grammar of statements and expressions needs 50 items in a row and 300 in a mask.
    "grammar": (300, 1_000),
}
"""Most items in one row of the parser, and most items that one mask may add."""
_INITIAL_LEXER_FUEL = 200_000
_STEP_LEXER_FUEL = 100_000
"""Most lexer fuel at the start and in one step.

Over a vocabulary of 130,000 tokens, a regular expression for URLs needs 35,000 of each.
"""
MAX_LEXER_STATES = 32_000
"""Most states of a lexer. A bounded repetition of a Unicode class adds 100 states for each new token."""
SMALL_LEXER_STATES = 4_000
"""Most states of a format's first lexer, which are enough for the answers of most formats."""
BYTES_PER_LEXER_STATE = 1 << 10
"""Most bytes of a lexer's state; usual ones take 400 to 800."""
_MAX_GRAMMAR_SIZE = 100_000
"""Largest grammar in llguidance's unit of size; 64 KiB of JSON schema have 6,000."""
MAX_RULES = 1_000
"""Most rules and terminals of a grammar; a grammar of SQL has 200."""
_RULE = re.compile(r"^\s*[?!]?\w+[^:\n\"/]*:", re.MULTILINE)


class BadFormatError(ValueError):
    """The format cannot be compiled, or no answer can match it. The message may be the compiler's."""


def load_tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Convert a ``tokenizer.json`` to llguidance's form. This takes 1 s for 100,000 tokens.

    Args:
        text: the content of ``tokenizer.json``.
        vocab_size: size of the model's logits.
        eos_token_ids: tokens that end an answer.

    Raises:
        ImportError: llguidance is not installed.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids)


def compile_format(tokenizer: LLTokenizer, output_format: OutputFormat, max_lexer_states: int) -> LLMatcher:
    """Return a matcher at the start of an answer.

    A hostile format may crash the process: see ``grammar_check``.

    Raises:
        BadFormatError: the format is not valid, or exceeds a limit.
    """
    from llguidance import LLMatcher, LLParserLimits

    read: Mapping[Kind, Callable[[str], str]] = {
        "json_schema": partial(LLMatcher.grammar_from_json_schema, defaults=_JSON_DEFAULTS),
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    if output_format.kind == "grammar" and (num_rules := len(_RULE.findall(output_format.text))) > MAX_RULES:
        raise BadFormatError(f"has {num_rules} rules; a grammar may have {MAX_RULES}")
    try:
        grammar = read[output_format.kind](output_format.text)
    except ValueError as error:
        raise BadFormatError(str(error)) from error
    row_items, step_items = _MAX_PARSER_ITEMS[output_format.kind]
    limits = LLParserLimits(
        max_items_in_row=row_items,
        step_max_items=step_items,
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        max_lexer_states=max_lexer_states,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        # Verbose errors would contain the grammar and the parser's state.
        verbose_errors=False,
    )
    # The log level is 0, since llguidance would print its warnings about a client's format to stderr.
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise BadFormatError(matcher.get_error().strip())
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise BadFormatError(_why_no_answer(first.get_error()))
    return matcher


def _why_no_answer(error: str) -> str:
    reason = first_line(error)
    if "too many" in reason.lower():
        return f"is too complex: {reason}"
    return "no answer has this form, not even an empty one"


def first_line(error: str) -> str:
    """Return the first line of an error, without the grammar and parser state that llguidance adds."""
    return error.strip().partition("\n")[0]
