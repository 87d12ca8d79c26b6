"""Structured output: every answer has the form that was asked for, whatever happens to its sequence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.engine.errors import NoTokenLeftError
from quire.engine.sequences.sequence import Sequence
from quire.engine.structured_output.grammar import GrammarCompiler
from quire.engine.structured_output.grammar_compile import BadFormatError
from quire.engine.structured_output.logits_rules import LogitsRules
from quire.engine.weights.loader import LoadedModel
from quire.sampling.output_format import OutputFormat
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.tiny_engine import make_engine, run

EOS = 1
SCHEMA = OutputFormat(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "sizes": {"type": "array", "items": {"enum": [1, 22, 333]}, "maxItems": 3},
            },
            "required": ["name", "sizes"],
            "additionalProperties": False,
        }
    ),
)
REGEX = OutputFormat("regex", "[a-f]{3}(-[0-9]{2}){1,3}")
LONG = OutputFormat("regex", "([a-z]{4}[0-9]){20}")
LARK = OutputFormat("grammar", 'start: item ("+" item)*\nitem: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/')


def make_request(
    compiler: GrammarCompiler, output_format: OutputFormat, name: str = "r", output: Any = (), **params: Any
) -> Sequence:
    values = {"temperature": 1.0, "max_tokens": 120, **params}
    prompt = list(range(20, 40))
    sampling = SamplingParams(**values)
    rules = LogitsRules(sampling, len(prompt), compiler.compile(output_format, len(prompt)))
    return Sequence(name, [*prompt, *output], len(prompt), sampling, b"root", logits_rules=rules)


def check(output_format: OutputFormat, text: str) -> None:
    """Fail unless the text has the form."""
    if output_format is SCHEMA:
        value = json.loads(text)
        assert set(value) == {"name", "sizes"}
        assert set(value["sizes"]) <= {1, 22, 333}
    elif output_format is REGEX:
        assert re.fullmatch(REGEX.text, text)
    else:
        assert isinstance(eval(re.sub(r"\d+", "1", text)), int)


@pytest.mark.parametrize("output_format", [SCHEMA, REGEX], ids=["json_schema", "regex"])
@pytest.mark.parametrize("seed", range(4))
def test_answers_of_a_random_model_have_the_form(
    model: LoadedModel,
    compiler: GrammarCompiler,
    decode: Callable[[list[int]], str],
    output_format: OutputFormat,
    seed: int,
) -> None:
    tokens = run(make_engine(model), make_request(compiler, output_format, seed=seed, max_tokens=300))["r", 0]
    assert tokens[-1] == EOS
    check(output_format, decode(tokens[:-1]))


def test_nested_grammars(
    model: LoadedModel, compiler: GrammarCompiler, decode: Callable[[list[int]], str]
) -> None:
    # A random model may open brackets without end; the bias makes it close them.
    bias = {token_id: -3.0 for token_id in range(320) if decode([token_id]) in ("(", "+")}
    request = make_request(compiler, LARK, seed=1, max_tokens=300, logit_bias=tuple(bias.items()))
    tokens = run(make_engine(model), request)["r", 0]
    assert tokens[-1] == EOS
    check(LARK, decode(tokens[:-1]))


def test_preempted_samples_are_those_of_single_requests(
    model: LoadedModel, compiler: GrammarCompiler
) -> None:
    expected = {
        (name, index): run(make_engine(model), make_request(compiler, LONG, seed=seed + index))["r", 0]
        for name, seed in (("a", 0), ("b", 10))
        for index in range(2)
    }
    crowded = make_engine(model, num_blocks=20)
    requests = [make_request(compiler, LONG, name, seed=seed, n=2) for name, seed in (("a", 0), ("b", 10))]
    assert run(crowded, *requests) == expected
    assert crowded.preemption.num_preempted > 0


def test_a_request_resumed_from_its_tokens_continues_unchanged(
    model: LoadedModel, compiler: GrammarCompiler
) -> None:
    whole = run(make_engine(model), make_request(compiler, SCHEMA, seed=3))["r", 0]
    for num_done in (1, len(whole) // 2, len(whole) - 1):
        resumed = make_request(compiler, SCHEMA, seed=3, output=whole[:num_done])
        assert run(make_engine(model), resumed)["r", 0] == whole[num_done:]


def test_every_beam_has_the_form(
    model: LoadedModel, compiler: GrammarCompiler, decode: Callable[[list[int]], str]
) -> None:
    request = make_request(compiler, REGEX, beam=BeamParams(4), max_tokens=40)
    answers = run(make_engine(model), request)
    assert len(answers) == 4
    for tokens in answers.values():
        assert tokens[-1] == EOS
        check(REGEX, decode(tokens[:-1]))


def test_an_answer_that_is_complete_before_min_tokens_is_an_error(
    model: LoadedModel, compiler: GrammarCompiler
) -> None:
    engine = make_engine(model)
    engine.add_request(make_request(compiler, OutputFormat("regex", "ab"), min_tokens=5))
    updates = [update for _ in range(3) for update in engine.step()]
    assert isinstance(updates[-1].error, NoTokenLeftError)
    assert updates[-1].error.field == "min_tokens"
    assert not engine.groups
    engine.check_conservation()


@pytest.mark.parametrize(
    ("output_format", "message"),
    [
        (OutputFormat("json_schema", '{"type": "nonsense"}'), "nonsense"),
        (OutputFormat("json_schema", '{"type"'), "EOF"),
        (OutputFormat("regex", "[ab"), "unclosed character class"),
        (OutputFormat("grammar", "start: missing"), "missing"),
    ],
)
def test_a_bad_format_is_refused_in_the_compilers_words(
    compiler: GrammarCompiler, output_format: OutputFormat, message: str
) -> None:
    with pytest.raises(BadFormatError, match=message):
        compiler.compile(output_format, 0)


@pytest.mark.parametrize(
    "output_format",
    [
        OutputFormat("json_schema", '{"$ref": "#"}'),
        OutputFormat("grammar", "start: start"),
        OutputFormat("regex", "[^\\s\\S]"),
    ],
)
def test_a_form_that_no_answer_has_is_refused(compiler: GrammarCompiler, output_format: OutputFormat) -> None:
    with pytest.raises(BadFormatError, match="no answer has this form"):
        compiler.compile(output_format, 0)


def test_a_form_may_be_empty(compiler: GrammarCompiler) -> None:
    assert compiler.compile(OutputFormat("regex", ""), 0).allowed([]).nonzero()[0].tolist() == [EOS]


def test_json_has_one_space_at_most(compiler: GrammarCompiler, folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    brace, space, newline = (tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in "{ \n")
    matcher = compiler.compile(OutputFormat("json_schema", '{"type": "object"}'), 0)
    assert not matcher.allowed([brace])[newline]
    assert matcher.allowed([brace])[space]
    assert not matcher.allowed([brace, space])[space]


def test_a_format_is_compiled_once(folder: Path, model: LoadedModel) -> None:
    reads: list[Path] = []

    def read() -> str:
        reads.append(folder)
        return (folder / "tokenizer.json").read_text("utf-8")

    compiler = GrammarCompiler(read, model.vocab_size, frozenset({EOS}))
    first, second = compiler.compile(REGEX, 0), compiler.compile(REGEX, 0)
    assert len(reads) == 2  # here, and in the process that tries formats
    before = second.allowed([])
    first.allowed([2 + 64])
    assert (second.allowed([]) == before).all()
