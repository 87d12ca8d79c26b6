from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenization.answers import formats
from quire.tokenization.answers.formats import AnswerFormat, CallFormat, Delimiters
from quire.tokenization.answers.parser import AnswerParser
from quire.tokenization.answers.pieces import Kind, Piece

THINK = Delimiters("<think>\n", "\n</think>")
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "f": {
        "properties": {
            "k": {"type": "string"},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "o": {"$ref": "#/$defs/thing"},
        },
        "$defs": {"thing": {"type": ["object", "string"]}},
    },
    "g": {},
}
BAR, GAP = "\uff5c", "\u2581"


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]
    call_id: str = ""


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: list[Call]


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', GAP)}{BAR}>"


def dsml(text: str) -> str:
    return text.replace("DSML:", f"{BAR}DSML{BAR}")


TWO_CALLS = [Call("f", {"k": "v"}), Call("g", {})]
TYPED_CALLS = [Call("f", {"k": "5", "n": 5}), Call("g", {})]
RECORDED: Mapping[str, tuple[CallFormat, str, list[Call]]] = {
    "hermes": (
        formats.HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"k": "</tool_call> \\" {", "n": [1, {}]}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "g"}</tool_call>',
        [Call("f", {"k": '</tool_call> " {', "n": [1, {}]}), Call("g", {})],
    ),
    "hermes, arguments in a string or absent": (
        formats.HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"k\\": \\"v\\"}"}</tool_call>'
        '<tool_call>{"name": "g"}</tool_call>',
        TWO_CALLS,
    ),
    "qwen coder": (
        formats.QWEN_CODER,
        "<tool_call>\n<function=f>\n<parameter=k>\n 5\n</parameter> of\n\n</parameter>\n"
        '<parameter=n>\n5\n</parameter>\n<parameter=o>\n{"a": 1}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call><function=g></function></tool_call>",
        [Call("f", {"k": " 5\n</parameter> of\n", "n": 5, "o": {"a": 1}}), Call("g", {})],
    ),
    "qwen coder, without the wrapper": (
        formats.QWEN_CODER,
        "<function=f>\n<parameter=n>\nNone\n</parameter>\n<parameter=o>\nplain\n</parameter>\n</function>",
        [Call("f", {"n": None, "o": "plain"})],
    ),
    "seed oss": (
        formats.SEED_OSS,
        "<seed:tool_call>\n<function=f>\n<parameter=k>v</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        TWO_CALLS,
    ),
    "llama": (
        formats.LLAMA_JSON,
        '{"name": "f", "parameters": {"k": "v"}}; {"type": "function", "name": "g", "parameters": {}}',
        TWO_CALLS,
    ),
    "llama with a tag": (
        formats.LLAMA_JSON,
        '<|python_tag|>{"name": "f", "parameters": {"k": "v"}};{"name": "g"}',
        TWO_CALLS,
    ),
    "llama pythonic": (
        formats.LLAMA_PYTHON,
        "[f(k=\"x](\", n=-1, o={'a': [true, None]}), g()]",
        [Call("f", {"k": "x](", "n": -1, "o": {"a": [True, None]}}), Call("g", {})],
    ),
    "llama pythonic with tags": (
        formats.LLAMA_PYTHON,
        "<|python_start|>[f(k='it\\'s')]<|python_end|>",
        [Call("f", {"k": "it's"})],
    ),
    "mistral": (
        formats.MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"k": "v"}}, {"name": "g", "arguments": {}}]',
        TWO_CALLS,
    ),
    "mistral v11": (
        formats.MISTRAL_NAMED,
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"k": "v"}[TOOL_CALLS]g{}',
        [Call("f", {"k": "v"}, "abcdefghi"), Call("g", {})],
    ),
    "deepseek v3": (
        formats.DEEPSEEK_V3,
        deepseek("tool calls begin")
        + f"{deepseek('tool call begin')}function{deepseek('tool sep')}f\n"
        + f'```json\n{{"k": "v"}}\n```{deepseek("tool call end")}\n'
        + f"{deepseek('tool call begin')}function{deepseek('tool sep')}g\n"
        + f"```json\n{{}}\n```{deepseek('tool call end')}{deepseek('tool calls end')}",
        TWO_CALLS,
    ),
    "deepseek v3.1": (
        formats.DEEPSEEK_V31,
        deepseek("tool calls begin")
        + f'{deepseek("tool call begin")}f{deepseek("tool sep")}{{"k": "v"}}{deepseek("tool call end")}'
        + f"{deepseek('tool call begin')}g{deepseek('tool sep')}{{}}{deepseek('tool call end')}"
        + deepseek("tool calls end"),
        TWO_CALLS,
    ),
    "deepseek v3.2": (
        formats.DEEPSEEK_V32,
        dsml(
            '<DSML:function_calls>\n<DSML:invoke name="f">\n'
            '<DSML:parameter name="k" string="true">5</DSML:parameter>\n'
            '<DSML:parameter name="n" string="false">5</DSML:parameter>\n</DSML:invoke>\n'
            '<DSML:invoke name="g">\n</DSML:invoke>\n</DSML:function_calls>'
        ),
        TYPED_CALLS,
    ),
    "glm": (
        formats.GLM,
        "<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        TYPED_CALLS,
    ),
    "glm without newlines": (
        formats.GLM,
        "<tool_call>f<arg_key>k</arg_key><arg_value>5</arg_value><arg_key>n</arg_key><arg_value>5</arg_value>"
        "</tool_call><tool_call>g</tool_call>",
        TYPED_CALLS,
    ),
    "kimi": (
        formats.KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"k": "v"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [Call("f", {"k": "v"}, "functions.f:0"), Call("g", {}, "functions.g:1")],
    ),
    "minimax": (
        formats.MINIMAX,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">5</parameter>\n'
        '<parameter name="n">5</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        TYPED_CALLS,
    ),
    "function gemma": (
        formats.FUNCTION_GEMMA,
        '<start_function_call>call:f{k:<escape>a{b"\n<escape>,n:3,o:{x:[<escape>,y:<escape>,true]}}'
        "<end_function_call><start_function_call>call:g{}<end_function_call>",
        [Call("f", {"k": 'a{b"\n', "n": 3, "o": {"x": [",y:", True]}}), Call("g", {})],
    ),
    "gemma 4": (
        formats.GEMMA_4,
        '<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|><|tool_call>call:g{}<tool_call|>',
        TWO_CALLS,
    ),
    "phi 4 mini": (
        formats.PHI_4_MINI,
        'functools[{"name": "f", "arguments": {"k": "v"}}, {"name": "g", "arguments": {}}]',
        TWO_CALLS,
    ),
    "granite 3": (
        formats.GRANITE_3,
        '<|tool_call|>[{"name": "f", "arguments": {"k": "v"}},{"name": "g", "arguments": {}}]',
        TWO_CALLS,
    ),
    "granite 3.1": (formats.GRANITE_31, '<tool_call>[{"name": "g", "arguments": {}}]', [Call("g", {})]),
}
HARMONY = AnswerFormat(calls=formats.HARMONY, channels=formats.HARMONY_CHANNELS)
HARMONY_RECORDED: Mapping[str, tuple[str, Parsed]] = {
    "all channels": (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>First."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"k": "v"}<|call|>',
        Parsed("Think.", "First.", [Call("f", {"k": "v"})]),
    ),
    "recipient before the channel": (
        ' to=functions.g<|channel|>commentary json<|message|>{"k": "<|call|>"}<|call|>',
        Parsed("", "", [Call("g", {"k": "<|call|>"})]),
    ),
    "two reasoning blocks and a final answer": (
        "<|channel|>analysis<|message|>A\n<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        Parsed("A\nB", "Done.", []),
    ),
    "no header": ("plain", Parsed("", "plain", [])),
}


def pieces_of(
    answer_format: AnswerFormat, tokens: Iterable[str], *, prompt_tail: str = "", **options: Any
) -> list[Piece]:
    parser = AnswerParser(
        answer_format, prompt_tail=prompt_tail, schemas=options.pop("schemas", SCHEMAS), **options
    )
    pieces = [piece for token in tokens for piece in parser.feed(token)]
    return pieces + parser.finish()


def text_of(pieces: Iterable[Piece], kind: Kind) -> str:
    return "".join(piece.text for piece in pieces if piece.kind is kind)


def parsed(pieces: Iterable[Piece]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return reasoning, content, and name, id and arguments of each call, as a client would join them."""
    pieces = list(pieces)
    calls: list[tuple[str, str, str]] = []
    for piece in pieces:
        if piece.kind is Kind.CALL and piece.name:
            assert piece.call_index == len(calls)
            calls.append((piece.name, piece.call_id, ""))
        if piece.kind is Kind.CALL and piece.text:
            name, call_id, arguments = calls[piece.call_index]
            assert piece.call_index == len(calls) - 1
            calls[-1] = (name, call_id, arguments + piece.text)
    return text_of(pieces, Kind.REASONING), text_of(pieces, Kind.CONTENT), calls


def as_objects(pieces: Iterable[Piece]) -> Parsed:
    reasoning, content, calls = parsed(pieces)
    return Parsed(
        reasoning, content, [Call(name, json.loads(text), call_id) for name, call_id, text in calls]
    )


def divisions(text: str) -> Iterator[list[str]]:
    """Yield a text at every cut, in characters, and in tokens of several characters."""
    for cut in range(1, len(text)):
        yield [text[:cut], text[cut:]]
    for size in (1, 2, 3, 5, 7):
        yield [text[start : start + size] for start in range(0, len(text), size)]


def check(answer_format: AnswerFormat, text: str, expected: Parsed, **options: Any) -> None:
    """Parse a text in all divisions, with arguments whole and in parts."""
    whole = pieces_of(answer_format, [text], **options)
    assert as_objects(whole) == expected
    for streams_arguments in (False, True):
        for tokens in divisions(text):
            pieces = pieces_of(answer_format, tokens, streams_arguments=streams_arguments, **options)
            assert parsed(pieces) == parsed(whole), tokens
            assert sum(piece.num_tokens for piece in pieces) == len(tokens), tokens


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_calls_are_the_same_at_every_cut(name: str) -> None:
    calls, text, expected = RECORDED[name]
    answer_format = AnswerFormat(THINK, calls)
    check(answer_format, text, Parsed("", "", expected))
    check(answer_format, f"<think>\nHm.\n\n</think>\n\n{text}", Parsed("Hm.", "", expected))
    check(
        answer_format, f"Hm.</think>{text}\n", Parsed("Hm.", "", expected), prompt_tail="assistant<think>\n"
    )
    if not calls.may_begin_answer:
        check(answer_format, f"Sure.\n{text}\nDone.", Parsed("", "Sure.\n\nDone.", expected))


@pytest.mark.parametrize("name", HARMONY_RECORDED)
def test_harmony_is_the_same_at_every_cut(name: str) -> None:
    text, expected = HARMONY_RECORDED[name]
    check(HARMONY, text, expected, prompt_tail="<|end|><|start|>assistant")


@pytest.mark.parametrize("name", RECORDED)
def test_a_call_that_the_end_cuts_off_is_content(name: str) -> None:
    calls, text, expected = RECORDED[name]
    for end in range(1, len(text)):
        pieces = pieces_of(AnswerFormat(THINK, calls), [text[:end]])
        content, found = as_objects(pieces)[1:]
        assert found == expected[: len(found)]
        assert text[:end].endswith(content)
        assert found or content == text[:end]


@pytest.mark.parametrize("name", RECORDED)
def test_without_tools_calls_are_content(name: str) -> None:
    calls, text, _ = RECORDED[name]
    for tokens in ([text], list(text)):
        pieces = pieces_of(AnswerFormat(THINK, calls), tokens, schemas={})
        assert parsed(pieces) == ("", text, [])


def tokens_of(answer_format: AnswerFormat, text: str) -> list[str]:
    """Divide a text into the format's special tokens and the characters between them."""
    tokens, start = [], 0
    while start < len(text):
        token = next((each for each in answer_format.tokens if text.startswith(each, start)), text[start])
        tokens.append(token)
        start += len(token)
    return tokens


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("hermes", {"<tool_call>", "</tool_call>"}),
        ("mistral v11", {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}),
        (
            "deepseek v3",
            {deepseek(f"tool {word}") for word in ("calls begin", "call begin", "sep", "call end")},
        ),
        ("deepseek v3.2", {f"{BAR}DSML{BAR}"}),
        ("glm", {"<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}),
        ("gemma 4", {"<|tool_call>", "<tool_call|>", '<|"|>'}),
    ],
)
def test_a_delimiter_that_is_a_token_is_recognised_only_as_that_token(name: str, special: set[str]) -> None:
    calls, text, expected = RECORDED[name]
    answer_format = AnswerFormat(THINK, calls, tokens=frozenset({*special, "<think>", "</think>"}))
    text = f"<think>\nHm.\n</think>\n\n{text}"
    assert as_objects(pieces_of(answer_format, tokens_of(answer_format, text))) == Parsed("Hm.", "", expected)
    assert parsed(pieces_of(answer_format, list(text))) == ("", text, [])


def test_a_special_token_that_is_no_delimiter_is_hidden() -> None:
    parser = AnswerParser(AnswerFormat(THINK), prompt_tail="", schemas={})
    assert parser.feed("Hi") == [Piece(Kind.CONTENT, "Hi", 1)]
    assert parser.feed("<|im_end|>", is_special=True) == [Piece(Kind.CONTENT, "", 1)]
    assert parser.feed("<|im_end|>") == [Piece(Kind.CONTENT, "<|im_end|>", 1)]


@pytest.mark.parametrize(
    ("prompt_tail", "expected"),
    [
        ("assistant\n<think>\n", ("a", "b", [])),
        ("assistant\n<think>\n\n</think>\n\n", ("", "a\n</think>\n\nb", [])),
        ("what does <think> mean?\nassistant\n", ("", "a\n</think>\n\nb", [])),
    ],
)
def test_the_prompt_decides_how_the_answer_begins(prompt_tail: str, expected: object) -> None:
    pieces = pieces_of(AnswerFormat(THINK), list("a\n</think>\n\nb"), prompt_tail=prompt_tail)
    assert parsed(pieces) == expected


def test_tokens_count_to_the_region_of_their_text() -> None:
    tokens = ["<think>", "\n", "Hm", ".", "</think>", "\n\n", "Hi", ".", "\n", "<tool_call>", "\n"]
    tokens += ['{"name": "g"', "}", "\n", "</tool_call>", "", "Bye"]
    pieces = pieces_of(AnswerFormat(THINK, formats.HERMES), tokens)
    counts = [(piece.kind, piece.num_tokens) for piece in pieces]
    assert sum(n for kind, n in counts if kind is Kind.REASONING) == 5
    assert sum(n for kind, n in counts if kind is Kind.CALL) == 7
    assert sum(n for kind, n in counts if kind is Kind.CONTENT) == 5


def test_whitespace_at_delimiters_is_left_out_and_other_whitespace_is_kept() -> None:
    answer_format = AnswerFormat(THINK, formats.HERMES)
    call = '<tool_call>{"name": "g"}</tool_call>'
    for text, content in [
        (" \n hi \n ", " \n hi \n "),
        ("<think>x</think> \n hi \n ", "hi \n "),
        (f"hi \n {call}\n", "hi"),
        (f"a\n{call}\n{call}\nb", "a\n\nb"),
        (" \n<think>x</think>\n", ""),
    ]:
        for tokens in ([text], list(text)):
            assert text_of(pieces_of(answer_format, tokens), Kind.CONTENT) == content


def test_several_reasoning_blocks_are_joined() -> None:
    pieces = pieces_of(AnswerFormat(THINK), list("<think>a\n</think>b<think>\nc</think>d"))
    assert parsed(pieces) == ("a\n\nc", "bd", [])


def test_a_call_ends_reasoning_only_in_formats_that_say_so() -> None:
    text = "a[TOOL_CALLS]g{}b"
    think = Delimiters("[THINK]", "[/THINK]")
    named = AnswerFormat(think, formats.MISTRAL_NAMED)
    assert parsed(pieces_of(named, list(f"[THINK]{text}"))) == ("a", "b", [("g", "", "{}")])
    kept = AnswerFormat(think, replace(formats.MISTRAL_NAMED, ends_reasoning=False))
    assert parsed(pieces_of(kept, list(f"[THINK]{text}"))) == (text, "", [])


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (formats.HERMES, "write <tool_call> or <tool_call>{x}</tool_call>, not <tool"),
        (formats.HERMES, '<tool_call>{"name": "f", "arguments": {"k": 1}</tool_call>'),
        (formats.HERMES, '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
        (formats.HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (formats.QWEN_CODER, "<tool_call><function=f>text</function></tool_call>"),
        (formats.LLAMA_JSON, '{"answer": {"name": "f", "parameters": {}}}'),
        (formats.LLAMA_JSON, '{"name": "unknown", "parameters": {}}'),
        (formats.LLAMA_JSON, 'Use {"name": "f", "parameters": {}}'),
        (formats.LLAMA_PYTHON, "[1] says [f(k=1)]"),
        (formats.LLAMA_PYTHON, "[f(1), g(k=open('x'))]"),
        (formats.LLAMA_PYTHON, "[f(k=1), unknown()]"),
        (formats.GEMMA_4, "<|tool_call>call:f{k:v<tool_call|>"),
        (formats.GLM, "<tool_call>some words</tool_call>"),
        (formats.PHI_4_MINI, "functools[0] is no call"),
        (formats.MISTRAL_LIST, "[TOOL_CALLS] [{]}"),
    ],
)
def test_text_that_is_no_call_is_content(calls: CallFormat, text: str) -> None:
    for tokens in ([text], *divisions(text)):
        assert parsed(pieces_of(AnswerFormat(THINK, calls), tokens)) == ("", text, [])


def test_content_after_broken_text_may_have_calls() -> None:
    text = '<tool_call><tool_call>{"name": "g"}</tool_call>'
    pieces = pieces_of(AnswerFormat(THINK, formats.HERMES), list(text))
    assert parsed(pieces) == ("", "<tool_call>", [("g", "", "{}")])


def test_line_breaks_in_strings_of_json_are_escaped() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"k": "a\nb"}}</tool_call>'
    pieces = pieces_of(AnswerFormat(THINK, formats.HERMES), list(text))
    assert as_objects(pieces).calls == [Call("f", {"k": "a\nb"})]


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"k" :"\\u00e9",  "n":1.50}}</tool_call>'
    pieces = pieces_of(AnswerFormat(THINK, formats.HERMES), list(text))
    assert parsed(pieces)[2] == [("f", "", '{"k" :"\\u00e9",  "n":1.50}')]


def test_streamed_arguments_are_returned_as_they_come() -> None:
    parser = AnswerParser(
        AnswerFormat(calls=formats.HERMES), prompt_tail="", schemas=SCHEMAS, streams_arguments=True
    )
    tokens = ["<tool_call>", '{"name": "f", "arguments": {', '"k": "a', "b", '"}', "}", "</tool_call>"]
    assert [parser.feed(token) for token in tokens] == [
        [],
        [Piece(Kind.CALL, "{", 2, 0, "f")],
        [Piece(Kind.CALL, '"k": "a', 1)],
        [Piece(Kind.CALL, "b", 1)],
        [Piece(Kind.CALL, '"}', 1)],
        [],
        [Piece(Kind.CALL, "", 2)],
    ]
    assert parser.finish() == []


def test_only_the_first_calls_are_returned_and_all_tokens_are_counted() -> None:
    _, text, _ = RECORDED["hermes"]
    for streams_arguments in (False, True):
        pieces = pieces_of(
            AnswerFormat(calls=formats.HERMES), list(text), max_calls=1, streams_arguments=streams_arguments
        )
        assert [call.name for call in as_objects(pieces).calls] == ["f"]
        assert sum(piece.num_tokens for piece in pieces) == len(text)


@pytest.mark.parametrize(
    ("text", "content", "stop"),
    [
        ("<think>a END</think>b END c", "b ", "END"),
        ("<think>a</think>\n\nb\n\nc", "b", "\n\n"),
        ("EN<think>D</think>END", "EN", "END"),
        ("no stop EN", "no stop EN", None),
        ("<think>a</think>\nE \n b", "E \n b", None),
    ],
)
def test_stop_strings_count_only_in_content(text: str, content: str, stop: str | None) -> None:
    for tokens in ([text], *divisions(text)):
        parser = AnswerParser(AnswerFormat(THINK), prompt_tail="", schemas={}, stop_strings=["END", "\n\n"])
        pieces, num_fed = [], 0
        for token in tokens:
            if parser.stop is None:
                pieces += parser.feed(token)
                num_fed += 1
        pieces += parser.finish()
        assert (text_of(pieces, Kind.CONTENT), parser.stop) == (content, stop)
        assert sum(piece.num_tokens for piece in pieces) == num_fed
        assert parser.feed("more") == []


def test_stop_strings_do_not_count_in_the_first_tokens() -> None:
    parser = AnswerParser(AnswerFormat(THINK), prompt_tail="", schemas={}, stop_strings=["."], min_tokens=2)
    pieces = [piece for token in ["a.", "b.", "c", ".d"] for piece in parser.feed(token)]
    assert (text_of(pieces, Kind.CONTENT), parser.stop) == ("a.b.c", ".")


ALL_FORMATS = [AnswerFormat(THINK, calls) for calls, _, _ in RECORDED.values()] + [HARMONY]
PARTS = sorted(
    {part for _, text, _ in RECORDED.values() for part in text.replace(">", ">\0").split("\0")}
    | {"<think>", "</think>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "<|call|>", " ", "\n"}
    | {"[", "]", "{", "}", '"', "\\", "'", "(", ")", ",", ":", "null", "1e999", "to=functions.f", "<|start|>"}
)
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=20)


@given(
    st.sampled_from(ALL_FORMATS), texts, st.booleans(), st.integers(1, 9), st.sampled_from([(), ("a", "</")])
)
def test_any_text_is_parsed_without_errors_and_alike_in_all_divisions(
    answer_format: AnswerFormat, parts: list[str], streams_arguments: bool, size: int, stops: Sequence[str]
) -> None:
    text = "".join(parts)
    options: dict[str, Any] = {
        "streams_arguments": streams_arguments,
        "prompt_tail": "<|start|>assistant",
        "stop_strings": stops,
    }
    whole = pieces_of(answer_format, [text], **options)
    divided = [text[start : start + size] for start in range(0, len(text), size)]
    for tokens in (parts, divided):
        pieces = pieces_of(answer_format, tokens, **options)
        assert parsed(pieces) == parsed(whole)
        assert stops or sum(piece.num_tokens for piece in pieces) == len(tokens)
    json.dumps(parsed(whole), ensure_ascii=False).encode()


@given(
    st.sampled_from(ALL_FORMATS),
    texts,
    st.lists(st.integers(0, 20), max_size=4),
    st.booleans(),
    st.sets(st.integers(0, 20), max_size=3),
)
def test_tokens_that_only_continue_a_text_may_be_fed_together(
    answer_format: AnswerFormat, parts: list[str], cuts: list[int], has_tokens: bool, special: set[int]
) -> None:
    if has_tokens:
        answer_format = replace(answer_format, tokens=frozenset({"<think>", "</think>", "<|message|>", "</"}))
    one_by_one, together = (
        AnswerParser(answer_format, prompt_tail="", schemas=SCHEMAS, streams_arguments=True) for _ in range(2)
    )
    places = sorted({0, len(parts), *(min(cut, len(parts)) for cut in cuts)})
    expected: list[Piece] = []
    pieces: list[Piece] = []
    for start, end in pairwise(places):
        tokens = [(parts[at], at in special) for at in range(start, end)]
        expected += one_by_one.feed_all(tokens)
        shown, hidden = (
            "".join(text for text, is_special in tokens if is_special is wanted) for wanted in (False, True)
        )
        fed = together.feed_text(shown, end - start, hidden)
        pieces += together.feed_all(tokens) if fed is None else [fed]
    assert [*pieces, *together.finish()] == [*expected, *one_by_one.finish()]


@given(
    st.sampled_from(ALL_FORMATS),
    st.lists(st.sampled_from(["", *PARTS]) | st.text(max_size=4), max_size=20),
    st.lists(st.integers(0, 20), max_size=4),
    st.booleans(),
)
def test_tokens_count_to_the_same_parts_however_they_are_batched(
    answer_format: AnswerFormat, tokens: list[str], cuts: list[int], streams_arguments: bool
) -> None:
    parser = AnswerParser(answer_format, prompt_tail="", schemas=SCHEMAS, streams_arguments=streams_arguments)
    pieces: list[Piece] = []
    for start, end in pairwise(sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})):
        batch = tokens[start:end]
        fed = parser.feed_text("".join(batch), len(batch))
        pieces += parser.feed_all((text, False) for text in batch) if fed is None else [fed]
    pieces += parser.finish()
    alone = pieces_of(answer_format, tokens, streams_arguments=streams_arguments)
    assert counted(pieces) == counted(alone)


@pytest.mark.parametrize("batches", [[["", "Bye"]], [[""], ["Bye"]]])
def test_a_token_without_text_counts_to_the_call_before_it(batches: list[list[str]]) -> None:
    parser = AnswerParser(AnswerFormat(THINK, formats.HERMES), prompt_tail="", schemas=SCHEMAS)
    pieces = parser.feed('<tool_call>{"name": "g"}</tool_call>')
    for batch in batches:
        fed = parser.feed_text("".join(batch), len(batch))
        pieces += parser.feed_all((text, False) for text in batch) if fed is None else [fed]
    assert counted([*pieces, *parser.finish()]) == {(Kind.CALL, 0): 2, (Kind.CONTENT, 0): 1}


def counted(pieces: Iterable[Piece]) -> Counter[tuple[Kind, int]]:
    """Return the number of tokens of each part."""
    counts: Counter[tuple[Kind, int]] = Counter()
    for piece in pieces:
        counts[piece.kind, piece.call_index] += piece.num_tokens
    return +counts


def test_a_text_without_a_delimiter_is_fed_at_once() -> None:
    parser = AnswerParser(AnswerFormat(THINK, formats.HERMES), prompt_tail="", schemas=SCHEMAS)
    assert parser.feed_text("a", 1) is None, "the answer may still begin with a delimiter"
    assert parser.feed_all([("a", False)]) == [Piece(Kind.CONTENT, "a", 1)]
    assert parser.feed_text("b c", 2) == Piece(Kind.CONTENT, "b c", 2)
    assert parser.feed_text("d <", 2) is None


@given(
    st.sampled_from(ALL_FORMATS), st.text(st.characters(exclude_characters="<[{|", exclude_categories=["Cs"]))
)
def test_plain_text_is_content_without_a_change(answer_format: AnswerFormat, text: str) -> None:
    assert parsed(pieces_of(answer_format, list(text))) == ("", text, [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "1.50", 1.5),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"oneOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/missing"}, "5", 5),
        ({"anyOf": 5, "type": {}}, "x", "x"),
        ({}, "NaN", "NaN"),
        (5, "[1]", [1]),
    ],
)
def test_raw_text_has_the_type_of_the_schema(schema: object, text: str, value: object) -> None:
    answer = f"<tool_call>f<arg_key>k</arg_key><arg_value>{text}</arg_value></tool_call>"
    schemas = {"f": {"properties": {"k": schema}}}
    [call] = as_objects(pieces_of(AnswerFormat(calls=formats.GLM), [answer], schemas=schemas)).calls
    assert call == Call("f", {"k": value})
