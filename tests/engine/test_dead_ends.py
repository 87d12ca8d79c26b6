"""Formats and other constraints that together allow no answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.structured_output.dead_ends import dead_end
from quire.engine.structured_output.grammar import GrammarCompiler
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.sampling.output_format import OutputFormat
from quire.sampling.params import SamplingParams

EOS, VOCAB_SIZE = 1, 320
PROMPT = list(range(20, 40))
TEXT = OutputFormat("json_schema", '{"type": "string", "maxLength": 60}')
LONG = OutputFormat("regex", "([a-z]{4}[0-9]){20}")
CHOICE = OutputFormat("grammar", 'start: "yes" | "no"')


def make_rules(
    compiler: GrammarCompiler, output_format: OutputFormat, constraints: dict[str, Any]
) -> LogitsRules:
    params = SamplingParams(**{"max_tokens": 120, **constraints})
    return LogitsRules(params, len(PROMPT), compiler.compile(output_format, len(PROMPT)))


@pytest.mark.parametrize(
    ("output_format", "constraints", "field"),
    [
        (CHOICE, {"allowed_token_ids": "xyz"}, "allowed_token_ids"),
        (CHOICE, {"allowed_token_ids": "yen"}, "allowed_token_ids"),
        (CHOICE, {"allowed_token_ids": "yes no"}, "allowed_token_ids"),  # without an end
        (CHOICE, {"bad_words": "yn"}, "bad_words"),
        (CHOICE, {"bad_words": "en"}, "bad_words"),
        (CHOICE, {"min_tokens": 5}, "min_tokens"),
        (OutputFormat("regex", "ab"), {"min_tokens": 4}, "min_tokens"),
    ],
)
def test_a_format_without_an_answer_under_the_other_constraints_is_found(
    compiler: GrammarCompiler,
    decode: Callable[[list[int]], str],
    output_format: OutputFormat,
    constraints: dict[str, Any],
    field: str,
) -> None:
    rules = make_rules(compiler, output_format, as_tokens(constraints, decode))
    error = dead_end(rules, PROMPT, VOCAB_SIZE, frozenset({EOS}))
    assert error is not None
    assert error.field == field


@pytest.mark.parametrize(
    ("output_format", "constraints"),
    [
        (CHOICE, {"allowed_token_ids": "on\1"}),
        (CHOICE, {"bad_words": "y"}),
        (CHOICE, {"min_tokens": 3}),
        (CHOICE, {"allowed_token_ids": "ye", "max_tokens": 2}),  # cut by its length
        (TEXT, {"min_tokens": 40}),
        (TEXT, {"bad_words": "z"}),
        (LONG, {"allowed_token_ids": "abc0123456789\1"}),
    ],
)
def test_a_format_with_answers_is_accepted(
    compiler: GrammarCompiler,
    decode: Callable[[list[int]], str],
    output_format: OutputFormat,
    constraints: dict[str, Any],
) -> None:
    rules = make_rules(compiler, output_format, as_tokens(constraints, decode))
    before = rules.copy()
    assert dead_end(rules, PROMPT, VOCAB_SIZE, frozenset({EOS})) is None
    assert rules.grammar is not None
    assert before.grammar is not None
    assert (rules.grammar.allowed(PROMPT) == before.grammar.allowed(PROMPT)).all()


def as_tokens(constraints: dict[str, Any], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Replace the letters in constraints by the ids of their tokens."""
    ids = {decode([token_id]): token_id for token_id in range(VOCAB_SIZE)} | {"\1": EOS}
    read: dict[str, Callable[[Any], Any]] = {
        "allowed_token_ids": lambda letters: frozenset(ids[letter] for letter in letters),
        "bad_words": lambda letters: tuple((ids[letter],) for letter in letters),
    }
    return {name: read.get(name, int)(value) for name, value in constraints.items()}
