"""Grammars of tool calls: what they accept and refuse in every family's format, as llguidance reads them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from quire.engine.structured_output.grammar_compile import MAX_LEXER_STATES, compile_format
from quire.models.source import demo_model_path
from quire.sampling.output_format import OutputFormat
from quire.tokenization.answers.argument_grammar import UnsupportedSchemaError
from quire.tokenization.answers.call_grammar import CallRules, Tool, call_grammar, grammar_after_reasoning
from quire.tokenization.answers.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM,
    GRANITE_3,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA_JSON,
    LLAMA_PYTHON,
    MINIMAX,
    MISTRAL_LIST,
    MISTRAL_NAMED,
    PHI_4_MINI,
    QWEN_CODER,
    AnswerFormat,
    CallFormat,
    Channels,
    Delimiters,
)

THINK = Delimiters("<think>\n", "\n</think>")
WEATHER = Tool(
    "weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
    is_strict=True,
)
CLOCK = Tool("clock", {"type": "object", "properties": {"zone": {"type": "string"}}})
EOS = "<|end|>"


class Family(NamedTuple):
    """A format, with one call of ``weather`` as its models write it."""

    calls: CallFormat | None
    call: str
    tokens: tuple[str, ...] = ()
    reasoning: Delimiters | None = None
    next_call: str = ""
    """What follows the call if it is the first of two."""


JSON_CALL = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
FAMILIES = {
    "none": Family(None, JSON_CALL),
    "hermes": Family(
        HERMES,
        f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        reasoning=THINK,
        next_call=f"\n<tool_call>\n{JSON_CALL}\n</tool_call>",
    ),
    "qwen": Family(
        HERMES,
        f"<tool_call>\n{JSON_CALL}\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        THINK,
        f"\n<tool_call>\n{JSON_CALL}\n</tool_call>",
    ),
    "qwen coder": Family(
        QWEN_CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
        THINK,
        "\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    ),
    "llama": Family(LLAMA_JSON, JSON_CALL.replace("arguments", "parameters"), ("<|python_tag|>",)),
    "pythonic": Family(
        LLAMA_PYTHON, '[weather(city="Rome", days=2)]', ("<|python_start|>", "<|python_end|>")
    ),
    "mistral": Family(MISTRAL_LIST, f"[TOOL_CALLS] [{JSON_CALL}]", ("[TOOL_CALLS]",)),
    "mistral 11": Family(
        MISTRAL_NAMED,
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        Delimiters("[THINK]", "[/THINK]"),
        '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Rome"}',
    ),
    "deepseek 3": Family(
        DEEPSEEK_V3,
        f'{DEEPSEEK_V3.section_open}{DEEPSEEK_V3.open}weather\n```json\n{{"city": "Rome"}}{DEEPSEEK_V3.close}'
        f"{DEEPSEEK_V3.section_close}",
        (DEEPSEEK_V3.section_open, DEEPSEEK_V3.section_close),
        THINK,
    ),
    "deepseek 3.1": Family(
        DEEPSEEK_V31,
        f'{DEEPSEEK_V31.section_open}{DEEPSEEK_V31.open}weather{DEEPSEEK_V31.name_end}{{"city": "Rome"}}'
        f"{DEEPSEEK_V31.close}{DEEPSEEK_V31.section_close}",
    ),
    "glm": Family(
        GLM,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        THINK,
    ),
    "kimi": Family(
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        THINK,
    ),
    "minimax": Family(
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        THINK,
    ),
    "function gemma": Family(
        FUNCTION_GEMMA,
        "<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma 4": Family(
        GEMMA_4,
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>,unit:<|"|>C<|"|>}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        Delimiters("<|channel>thought\n", "<channel|>"),
    ),
    "phi": Family(PHI_4_MINI, f"functools[{JSON_CALL}]"),
    "granite": Family(GRANITE_3, f"<|tool_call|>[{JSON_CALL}]", ("<|tool_call|>",)),
    "harmony": Family(
        HARMONY,
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}',
        ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
}
each_family = pytest.mark.parametrize("name", FAMILIES)


class Model:
    """A tokenizer with a family's tokens, and the family's format."""

    def __init__(self, family: Family) -> None:
        self.library = Library.from_file(str(demo_model_path() / "tokenizer.json"))
        self.library.add_tokens(
            [AddedToken(text, special=at % 2 == 0) for at, text in enumerate(family.tokens)]
        )
        self.tokenizer = LLTokenizer(
            self.library.to_str(), n_vocab=self.library.get_vocab_size(), eos_token=[1]
        )
        channels = Channels() if family.calls is HARMONY else None
        self.format = AnswerFormat(family.reasoning, family.calls, channels, frozenset(family.tokens))
        ids = self.library.get_vocab()
        self.token_ids = {text: ids[text] for text in family.tokens if text != "<|call|>"}

    def grammar(
        self, *tools: Tool, must_call: bool = False, is_single: bool = False, in_reasoning: bool = False
    ) -> str:
        rules = CallRules(tools or (WEATHER, CLOCK), must_call, is_single)
        text = call_grammar(self.format, rules, self.token_ids, in_reasoning=in_reasoning)
        assert text is not None
        return text

    def matcher(self, grammar: str) -> LLMatcher:
        return compile_format(self.tokenizer, OutputFormat("grammar", grammar), MAX_LEXER_STATES)

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether a text is a complete answer of a grammar."""
        matcher, ids = self.matcher(grammar), self.library.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@cache
def model(name: str) -> Model:
    return Model(FAMILIES[name])


@each_family
def test_a_call_that_must_be_made_is_the_whole_answer(name: str) -> None:
    family, made = FAMILIES[name], model(name)
    grammar = made.grammar(must_call=True, is_single=True)
    assert made.accepts(grammar, family.call)
    assert not made.accepts(grammar, "no call")
    assert not made.accepts(grammar, family.call.replace("weather", "feather"))
    assert not made.accepts(grammar, family.call.replace("city", "pity"))
    assert not made.accepts(grammar, family.call + family.next_call) or not family.next_call


@each_family
def test_the_model_may_decide_and_then_only_calls_known_tools(name: str) -> None:
    family, made = FAMILIES[name], model(name)
    rules = CallRules((WEATHER, CLOCK))
    grammar = call_grammar(made.format, rules, made.token_ids, in_reasoning=False)
    if name in ("none", "pythonic", "llama") and grammar is None:
        return
    assert grammar is not None
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    assert made.accepts(grammar, f"{final}Say a < b and <tool is text.")
    if name in ("llama", "pythonic"):
        return
    assert made.accepts(grammar, family.call)
    assert not made.accepts(grammar, family.call.replace("weather", "feather"))
    if not final:
        assert made.accepts(grammar, f"I look.\n{family.call} Done.")
        assert made.accepts(grammar, family.call + family.next_call)


@each_family
def test_reasoning_comes_before_a_call(name: str) -> None:
    family, made = FAMILIES[name], model(name)
    if family.reasoning is None:
        return
    opening, closing = (each.strip() for each in family.reasoning)
    inside = made.grammar(must_call=True, in_reasoning=True)
    assert made.accepts(inside, f"Hm.{closing}\n\n{family.call}")
    assert not made.accepts(inside, f"Hm.{closing}\n\nNo.")
    before = made.grammar(must_call=True)
    assert made.accepts(before, f"{opening}\nHm.{closing}\n\n{family.call}")
    free = made.grammar(in_reasoning=True)
    assert made.accepts(free, f"Hm.{closing}\n\nNo call.")
    assert made.accepts(free, f"Hm.{closing}\n\n{family.call}")


@pytest.mark.parametrize("name", ["hermes", "qwen"])
def test_a_chosen_format_begins_after_the_reasoning(name: str) -> None:
    made = model(name)
    for in_reasoning, opening in ((True, ""), (False, "<think>")):
        for kind, text, answer in (
            ("json_schema", '{"type": "object"}', '{"a": 1}'),
            ("regex", "a/b+", "a/bb"),
            ("grammar", 'start: text "}"\ntext: /a+/', "aa}"),
        ):
            grammar = grammar_after_reasoning(
                made.format, kind, text, made.token_ids, in_reasoning=in_reasoning
            )
            assert made.accepts(grammar, f"{opening}Hm.</think>\n\n{answer}")
            assert not made.accepts(grammar, f"{opening}Hm.</think>\n\nNo.")
            assert made.accepts(grammar, answer) is not in_reasoning


@each_family
def test_a_tool_that_is_not_strict_has_any_arguments_unless_it_must_be_called(name: str) -> None:
    family, made = FAMILIES[name], model(name)
    loose = WEATHER._replace(is_strict=False)
    text = family.call.replace("city", "town")
    free = call_grammar(made.format, CallRules((loose,)), made.token_ids, in_reasoning=False)
    if free is not None and name not in ("llama", "pythonic"):
        assert made.accepts(free, text)
    schema = {**(WEATHER.parameters or {}), "additionalProperties": False}
    assert not made.accepts(made.grammar(loose._replace(parameters=schema), must_call=True), text)


@pytest.mark.parametrize("name", ["qwen coder", "pythonic", "gemma 4"])
def test_a_keyword_that_cannot_be_enforced_is_refused_for_strict_tools_only(name: str) -> None:
    made = model(name)
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^R"}}}
    with pytest.raises(UnsupportedSchemaError, match="weather: the keyword pattern"):
        made.grammar(Tool("weather", schema, is_strict=True), must_call=True)
    assert made.accepts(
        made.grammar(Tool("weather", schema), must_call=True),
        FAMILIES[name].call.replace(',unit:<|"|>C<|"|>', ""),
    )


def test_a_keyword_that_llguidance_does_not_know_is_passed_over_unless_the_tool_is_strict() -> None:
    made = model("qwen")
    schema = {"type": "object", "propertyNames": {"pattern": "^c"}}
    assert made.accepts(made.grammar(Tool("weather", schema), must_call=True), FAMILIES["qwen"].call)
    with pytest.raises(ValueError, match="propertyNames"):
        made.matcher(made.grammar(Tool("weather", schema, is_strict=True), must_call=True))


@pytest.mark.parametrize("name", ["pythonic", "gemma 4"])
def test_strict_arguments_nest(name: str) -> None:
    made = model(name)
    inner = {
        "type": "object",
        "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}},
        "required": ["x"],
    }
    schema = {
        "type": "object",
        "properties": {"points": {"type": "array", "items": inner}},
        "required": ["points"],
    }
    grammar = made.grammar(Tool("draw", schema, is_strict=True), must_call=True)
    text = {
        "pythonic": '[draw(points=[{"x": 1.5, "on": True}, {"x": 2}])]',
        "gemma 4": "<|tool_call>call:draw{points:[{x:1.5,on:true},{x:2}]}<tool_call|>",
    }[name]
    assert made.accepts(grammar, text)
    assert not made.accepts(grammar, text.replace("1.5", "true"))


def test_a_call_without_a_format_follows_the_definitions_of_its_parameters() -> None:
    made = model("none")
    schema = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
    }
    grammar = made.grammar(Tool("weather", schema), must_call=True)
    assert made.accepts(grammar, JSON_CALL)
    assert not made.accepts(grammar, JSON_CALL.replace("Rome", "Bonn"))


def test_the_tools_of_an_agent_compile() -> None:
    """24 tools with schemas of 700 bytes, as a coding agent sends them, in formats of all kinds."""
    properties = {f"option_{at}": {"type": "string", "description": "x" * 60} for at in range(6)}
    schema = {"type": "object", "properties": properties, "required": ["option_0"]}
    tools = [Tool(f"tool_{at}", schema, is_strict=True) for at in range(24)]
    for name in FAMILIES:
        for must_call in (False, True):
            rules = CallRules(tools, must_call)
            grammar = call_grammar(model(name).format, rules, model(name).token_ids, in_reasoning=False)
            if grammar is not None:
                model(name).matcher(grammar)


def test_options_of_a_schema_that_are_none_are_passed_over() -> None:
    grammar = model("hermes").grammar(Tool("weather", {"type": "object", "x-guidance": "a"}), must_call=True)
    assert model("hermes").accepts(grammar, FAMILIES["hermes"].call)
