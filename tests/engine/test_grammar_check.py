"""Hostile formats: each is refused, and ends no process but its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from quire.engine.structured_output import grammar, grammar_compile
from quire.engine.structured_output.grammar import (
    CompiledFormat,
    FormatFailedError,
    GrammarCompiler,
    GrammarMatcher,
    StructuredOutputUnavailableError,
)
from quire.engine.structured_output.grammar_check import FormatChecker
from quire.engine.structured_output.grammar_compile import BadFormatError
from quire.models.source import demo_model_path
from quire.sampling.output_format import OutputFormat

VOCAB_SIZE = 2048
EOS = 1
A = OutputFormat("regex", "a{1,9}")
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(900)) + 'r900: "a"\n'
AMBIGUOUS = OutputFormat("grammar", 'start: a\na: a a | "a" | "aa" | "aaa" | b\nb: b a | a b | "a"\n')


def read_tokenizer() -> str:
    return (demo_model_path() / "tokenizer.json").read_text("utf-8")


@pytest.fixture(scope="module")
def shared() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(read_tokenizer, VOCAB_SIZE, frozenset({EOS}))
    yield compiler
    compiler.close()


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(read_tokenizer, VOCAB_SIZE, frozenset({EOS}))
    yield compiler
    compiler.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("grammar", CHAIN, "nests too deeply"),
        ("grammar", CHAIN + "\n".join(f'x{i}: "a"' for i in range(200)), "has 1102 rules"),
        ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "too deeply nested"),
        ("grammar", "start: a*\na: " + "a a | " * 9000 + '"x"', "more than 2 s"),
        ("grammar", "start: " + " | ".join(f'"{i}"' for i in range(400)), "401 items; max is 300"),
        # It takes time and memory alike, so either limit may come first.
        ("regex", "a?" * 15000 + "a" * 15000, "more than 2 s|too large"),
        ("regex", "(?:" * 9000 + "a" + "b)*" * 9000, "invalid regex"),
        ("json_schema", '{"properties":{"a":' * 3000 + "{}" + "}}" * 3000, "recursion limit"),
        ("json_schema", '{"type":"integer","multipleOf":99999989}', "more than 2 s|too large"),
        ("json_schema", '{"items":' * 10_000 + "{}" + "}" * 10_000, "recursion limit"),
    ],
)
def test_a_hostile_format_is_refused_by_a_process_of_its_own(
    shared: GrammarCompiler, capfd: pytest.CaptureFixture[str], kind: Any, text: str, problem: str
) -> None:
    with pytest.raises(BadFormatError, match=problem):
        shared.compile(OutputFormat(kind, text), 0)
    pid = shared.checker.pid
    assert shared.compile(A, 0).allowed([]).any()
    assert shared.checker.pid == pid
    assert capfd.readouterr() == ("", "")


def test_each_format_is_tried_once(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[OutputFormat] = []
    check = FormatChecker.check

    def recorded(checker: FormatChecker, output_format: OutputFormat) -> int:
        tried.append(output_format)
        return check(checker, output_format)

    monkeypatch.setattr(FormatChecker, "check", recorded)
    bad = OutputFormat("regex", "[")
    for _ in range(3):
        compiler.compile(A, 0)
        with pytest.raises(BadFormatError, match="unclosed"):
            compiler.compile(bad, 0)
    assert tried == [A, bad]
    assert compiler.cached_matcher(A, 0) is not None
    assert compiler.cached_matcher(AMBIGUOUS, 0) is None


def test_the_process_that_tries_formats_is_started_again(compiler: GrammarCompiler) -> None:
    compiler.compile(A, 0)
    first = compiler.checker.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    compiler.compile(OutputFormat("regex", "b"), 0)
    assert compiler.checker.pid != first


def test_without_it_formats_are_not_compiled(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StructuredOutputUnavailableError, match="has ended"):
        compiler.compile(A, 0)


def test_the_cache_holds_bytes_not_formats(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "CACHE_BYTES", 14 << 20)
    small = [OutputFormat("regex", f"a{{{i}}}") for i in range(2, 6)]
    for each in small:
        compiler.compile(each, 0)
    assert [compiler.cached_matcher(each, 0) is not None for each in small] == [False, True, True, True]
    compiler.compile(OutputFormat("json_schema", f'{{"pattern": "{"a?" * 2500 + "a" * 2500}"}}'), 0)
    assert compiler.num_cached_bytes <= 14 << 20


def test_an_ambiguous_grammar_ends_with_an_error(shared: GrammarCompiler) -> None:
    token = int(np.flatnonzero(shared.compile(OutputFormat("regex", "a"), 0).allowed([]))[0])
    ends = []
    for _ in range(2):
        matcher, answer = shared.compile(AMBIGUOUS, 3), [7, 8, 9]
        with pytest.raises(FormatFailedError, match=r"^format.grammar cannot be continued after \d+ tokens"):
            while len(answer) < 1000:
                assert matcher.allowed(answer)[token]
                answer.append(token)
        ends.append(len(answer))
    assert ends[0] == ends[1] < 400


def test_an_answer_that_violates_its_format_is_an_error(shared: GrammarCompiler) -> None:
    matcher = shared.compile(OutputFormat("regex", "ab"), 0)
    forbidden = int(np.flatnonzero(~matcher.allowed([]))[-1])
    with pytest.raises(FormatFailedError, match="after 1 tokens"):
        matcher.allowed([forbidden])


def test_a_lexer_that_is_full_is_replaced(
    shared: GrammarCompiler, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = OutputFormat("regex", "([a-z ]{1,200}[0-9]){9}x")
    expected = [masks_of_answers(shared.compile(form, 0), seeds=[seed]) for seed in range(4)]
    num_restarts = limit_lexers(monkeypatch, 200)
    assert [masks_of_answers(compiler.compile(form, 0), seeds=[seed]) for seed in range(4)] == expected
    assert num_restarts() >= 2


def test_answers_that_fill_their_lexer_together_continue_separately(
    shared: GrammarCompiler, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = OutputFormat("regex", "([a-z ]{1,200}[0-9]){9}x")
    expected = masks_of_answers(shared.compile(form, 0), seeds=range(4))
    num_restarts = limit_lexers(monkeypatch, 200)
    assert masks_of_answers(compiler.compile(form, 0), seeds=range(4)) == expected
    assert num_restarts() >= 4


def test_a_format_counts_with_the_states_of_its_larger_lexer(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = OutputFormat("regex", "([a-z ]{1,200}[0-9]){9}x")
    limit_lexers(monkeypatch, 2000, small=100)
    compiler.compile(A, 0)
    matcher = compiler.compile(form, 0)
    before = compiler.num_cached_bytes
    masks_of_answers(matcher, seeds=[0])
    assert compiler.num_cached_bytes == before + 1900 * grammar_compile.BYTES_PER_LEXER_STATE
    monkeypatch.setattr(grammar, "CACHE_BYTES", before)
    compiler.compile(form, 0)
    assert compiler.cached_matcher(A, 0) is None


def test_a_format_may_need_a_larger_lexer_for_its_first_mask(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_lexers(monkeypatch, 2000, small=1)
    assert compiler.compile(OutputFormat("regex", "one|two|three"), 0).allowed([]).any()


def limit_lexers(monkeypatch: pytest.MonkeyPatch, limit: int, small: int | None = None) -> Callable[[], int]:
    """Limit the states of lexers; return a function that counts how often an answer got another lexer."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", limit)
    monkeypatch.setattr(grammar, "SMALL_LEXER_STATES", limit if small is None else small)
    restarts: list[LLMatcher] = []
    restart = CompiledFormat.restart

    def recorded(compiled: CompiledFormat, first: LLMatcher) -> LLMatcher | None:
        matcher = restart(compiled, first)
        assert matcher is not None
        restarts.append(matcher)
        return matcher

    monkeypatch.setattr(CompiledFormat, "restart", recorded)
    return lambda: len(restarts)


def masks_of_answers(matcher: GrammarMatcher, seeds: Sequence[int]) -> list[list[bytes]]:
    """Write random answers of 40 tokens at the same time; return the masks of each."""
    matchers = [matcher.copy() for _ in seeds]
    rngs = [np.random.default_rng(seed) for seed in seeds]
    answers: list[list[int]] = [[] for _ in seeds]
    masks: list[list[bytes]] = [[] for _ in seeds]
    for _ in range(40):
        for each, rng, answer, found in zip(matchers, rngs, answers, masks, strict=True):
            allowed = each.allowed(answer)
            found.append(allowed.tobytes())
            answer.append(int(rng.choice(np.flatnonzero(allowed))))
    return masks


def test_the_masks_of_one_request_share_a_budget(
    shared: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = shared.compile(A, 0)
    sample = matcher.copy()
    matcher.allowed([])
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.0)
    with pytest.raises(FormatFailedError, match="masks took more than 0 s"):
        sample.allowed([])
