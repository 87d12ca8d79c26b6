"""How models write reasoning and tool calls: one table, which parsers and grammars read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from quire.tokenization.answers.response_template import ResponseTemplate, read_response_template


class Delimiters(NamedTuple):
    """The texts before and after a part of an answer."""

    open: str
    close: str


class CallSyntax(Enum):
    """How a call writes its name and its arguments."""

    JSON_CALL = auto()
    """One JSON object has both: ``{"name": "F", "arguments": {"k": "v"}}``."""
    JSON_ARGUMENTS = auto()
    """The name, then a JSON object."""
    PARAMETERS = auto()
    """The name, then each argument as raw text between tags: ``<parameter=k>v</parameter>``."""
    KEY_VALUES = auto()
    """The name, then an object with unquoted keys and delimited strings: ``{k:<escape>v<escape>}``."""
    PYTHON = auto()
    """A Python call with literals as arguments: ``F(k="v")``."""


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls.

    ::

        section_open  open NAME name_end ARGUMENTS close  separator  open …  section_close

    The texts are as the model was trained to write them. An empty one does not occur. Parsers also accept
    other whitespace around their words. ``JSON_CALL`` and ``PYTHON`` write name and arguments in one.
    """

    syntax: CallSyntax
    section_open: str = ""
    open: str = ""
    name_end: str = ""
    close: str = ""
    separator: str = ""
    section_close: str = ""
    is_section_per_call: bool = False
    """Whether each call has its own section; the separator then stands between sections."""
    may_begin_answer: bool = False
    """Whether a section at the beginning of the content may omit the special tokens around it."""
    ends_reasoning: bool = False
    """Whether a call may begin inside of reasoning, and then ends it."""
    arguments_key: str = "arguments"
    """Key of the arguments in a ``JSON_CALL``."""
    name_prefix: str = ""
    """Text that precedes the function's name and belongs to the id of the call, not to the name."""
    index_open: str = ""
    """Text between the name and the number of the call; name and number together are then the call's id."""
    id_open: str = ""
    """Text between the name and the id of the call; models write both or neither."""
    parameter_open: str = ""
    key_end: str = ""
    """Text between the key and the value of a parameter."""
    json_key_end: str = ""
    """The same text if the value is JSON; empty if only the tool's schema distinguishes JSON from text."""
    value_end: str = ""
    string_delimiter: str = ""
    """Text before and after each string of ``KEY_VALUES``."""


class Channels(NamedTuple):
    """Headers of harmony, which say what the text after them is.

    ::

        <|start|>assistant<|channel|>NAME to=RECIPIENT <|message|>TEXT<|end|>
    """

    starts: tuple[str, ...] = ("<|start|>", "<|channel|>")
    header_end: str = "<|message|>"
    ends: tuple[str, ...] = ("<|end|>", "<|return|>", "<|call|>")
    reasoning_channel: str = "analysis"
    recipient: str = "to="
    """Text before the name of a called function."""
    prompt_end: str = "<|start|>assistant"
    """End of a prompt whose answer begins inside of a header."""


@dataclass(frozen=True)
class AnswerFormat:
    """How a model writes reasoning and calls; what is absent stays part of the content."""

    reasoning: Delimiters | None = None
    calls: CallFormat | None = None
    channels: Channels | None = None
    tokens: frozenset[str] = frozenset()
    """Delimiters, or parts of them, that are one token of the model. Only that token counts as the delimiter,
    not the same characters in several tokens, which people and models write about."""


def _calls(
    syntax: CallSyntax, call: str, section: str = "", parameter: str = "", **options: Any
) -> CallFormat:
    """Return a format whose texts are written around ``{}``: name and arguments, calls, key and value."""
    opened, *between, close = call.split("{}")
    section_open, _, section_close = section.partition("{}")
    names = ("parameter_open", "key_end", "value_end")
    texts: dict[str, Any] = dict(zip(names, parameter.split("{}"), strict=False))
    texts |= {"section_open": section_open, "section_close": section_close, "name_end": "".join(between)}
    return CallFormat(syntax, open=opened, close=close, **texts, **options)


_BAR = "\uff5c"
_DSML = f"{_BAR}DSML{_BAR}"


def _deepseek(text: str) -> str:
    """Return a text with DeepSeek's characters in the delimiters, which are written with ``|`` and ``_``."""
    return text.replace("|", _BAR).replace("_", "\u2581")


HERMES = _calls(CallSyntax.JSON_CALL, "<tool_call>\n{}\n</tool_call>", separator="\n")
QWEN_CODER = _calls(
    CallSyntax.PARAMETERS,
    "<function={}>\n{}</function>\n",
    "<tool_call>\n{}</tool_call>",
    "<parameter={}>\n{}\n</parameter>\n",
    separator="\n",
    is_section_per_call=True,
)
LLAMA_JSON = _calls(
    CallSyntax.JSON_CALL,
    "{}",
    "<|python_tag|>{}",
    separator="; ",
    may_begin_answer=True,
    arguments_key="parameters",
)
LLAMA_PYTHON = _calls(
    CallSyntax.PYTHON, "{}", "<|python_start|>[{}]<|python_end|>", separator=", ", may_begin_answer=True
)
MISTRAL_LIST = _calls(CallSyntax.JSON_CALL, "{}", "[TOOL_CALLS] [{}]", separator=", ")
MISTRAL_NAMED = _calls(
    CallSyntax.JSON_ARGUMENTS, "[TOOL_CALLS]{}[ARGS]{}", id_open="[CALL_ID]", ends_reasoning=True
)
DEEPSEEK_V3 = _calls(
    CallSyntax.JSON_ARGUMENTS,
    _deepseek("<|tool_call_begin|>function<|tool_sep|>{}\n```json\n{}\n```<|tool_call_end|>"),
    _deepseek("<|tool_calls_begin|>{}<|tool_calls_end|>"),
    separator="\n",
)
DEEPSEEK_V31 = _calls(
    CallSyntax.JSON_ARGUMENTS,
    _deepseek("<|tool_call_begin|>{}<|tool_sep|>{}<|tool_call_end|>"),
    _deepseek("<|tool_calls_begin|>{}<|tool_calls_end|>"),
)
DEEPSEEK_V32 = _calls(
    CallSyntax.PARAMETERS,
    f'<{_DSML}invoke name="{{}}">\n{{}}</{_DSML}invoke>\n',
    f"<{_DSML}function_calls>\n{{}}</{_DSML}function_calls>",
    f'<{_DSML}parameter name="{{}}" string="true">{{}}</{_DSML}parameter>\n',
    json_key_end='" string="false">',
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32, section_open=f"<{_DSML}tool_calls>\n", section_close=f"</{_DSML}tool_calls>"
)
HARMONY = _calls(
    CallSyntax.JSON_ARGUMENTS,
    "<|channel|>commentary to={} <|constrain|>json<|message|>{}<|call|>",
    name_prefix="functions.",
)
GLM = _calls(
    CallSyntax.PARAMETERS,
    "<tool_call>{}\n{}</tool_call>",
    parameter="<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    separator="\n",
)
KIMI = _calls(
    CallSyntax.JSON_ARGUMENTS,
    "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
    name_prefix="functions.",
    index_open=":",
    ends_reasoning=True,
)
MINIMAX = _calls(
    CallSyntax.PARAMETERS,
    '<invoke name="{}">\n{}</invoke>\n',
    "<minimax:tool_call>\n{}</minimax:tool_call>",
    '<parameter name="{}">{}</parameter>\n',
)
FUNCTION_GEMMA = _calls(
    CallSyntax.KEY_VALUES, "<start_function_call>call:{}<end_function_call>", string_delimiter="<escape>"
)
GEMMA_4 = _calls(CallSyntax.KEY_VALUES, "<|tool_call>call:{}<tool_call|>", string_delimiter='<|"|>')
SEED_OSS = replace(
    QWEN_CODER,
    section_open="<seed:tool_call>\n",
    section_close="</seed:tool_call>",
    key_end=">",
    value_end="</parameter>\n",
)
PHI_4_MINI = _calls(CallSyntax.JSON_CALL, "{}", "functools[{}]", separator=", ")
GRANITE_3 = replace(PHI_4_MINI, section_open="<|tool_call|>[")
GRANITE_31 = replace(PHI_4_MINI, section_open="<tool_call>[")

HARMONY_CHANNELS = Channels()
_THINK = Delimiters("<think>\n", "\n</think>")
_REASONING: tuple[tuple[str, Delimiters], ...] = (
    ("</seed:think>", Delimiters("<seed:think>", "</seed:think>")),
    ("[THINK]", Delimiters("[THINK]", "[/THINK]")),
    ("<|channel>", Delimiters("<|channel>thought\n", "<channel|>")),
    ("</think>", _THINK),
    ("<think>", _THINK),
)
"""Text in a chat template's source, and the delimiters of reasoning that it shows; the first one counts."""
_CALLS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    ((_DSML, "tool_calls>"), DEEPSEEK_V4),
    ((_DSML,), DEEPSEEK_V32),
    ((_deepseek("<|tool_calls_begin|>"), "```json"), DEEPSEEK_V3),
    ((_deepseek("<|tool_calls_begin|>"),), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<minimax:tool_call>",), MINIMAX),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>", "<tool_call|>"), GEMMA_4),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<arg_key>",), GLM),
    (("<seed:tool_call>",), SEED_OSS),
    (("<function=", "<parameter="), QWEN_CODER),
    (("<|tool|>", "<|/tool|>"), PHI_4_MINI),
    (("functools[",), PHI_4_MINI),
    (("<tool_call>[",), GRANITE_31),
    (("<tool_call>",), HERMES),
    (("<|tool_call|>",), GRANITE_3),
    (("<|python_start|>",), LLAMA_PYTHON),
    (("[func_name1(",), LLAMA_PYTHON),
    (("<|python_tag|>",), LLAMA_JSON),
    (("<|start_header_id|>ipython",), LLAMA_JSON),
)
"""Texts in a chat template's source, and the calls if all of them occur; the first one counts."""


def find_answer_format(
    tokenizer_config: Mapping[str, Any], template_source: str | None, added_tokens: Iterable[str] = ()
) -> AnswerFormat | None:
    """Return how a model writes reasoning and calls, or None if its files do not show it.

    The ``response_template`` of ``tokenizer_config`` takes precedence over the chat template's source.
    ``added_tokens`` are the texts of the tokenizer's added tokens, special or not.
    """
    template = read_response_template(tokenizer_config.get("response_template"))
    source = template.source if template else template_source or ""
    calls = next((calls for marks, calls in _CALLS if all(mark in source for mark in marks)), None)
    channels = HARMONY_CHANNELS if calls is HARMONY else None
    reasoning = next((each for mark, each in _REASONING if mark in source and channels is None), None)
    if template and not channels:
        reasoning = reasoning or (Delimiters(*template.reasoning) if all(template.reasoning) else None)
        calls = calls or _calls_of(template)
    if calls is None and reasoning is None:
        return None
    found = AnswerFormat(reasoning, calls, channels)
    texts = list(_texts(astuple(found)))
    tokens = (token for token in added_tokens if len(token) > 2 and not token.isspace())
    return replace(found, tokens=frozenset(each for each in tokens if any(each in text for text in texts)))


def _calls_of(template: ResponseTemplate) -> CallFormat | None:
    """Return calls of an unknown model."""
    close = "".join(template.call_close[:1])
    if not all(text.strip() for text in (*template.call_open, *template.parameter)):
        return None
    match template.call_open, template.parameter:
        case (before,), _ if template.is_list:
            return _calls(CallSyntax.JSON_CALL, "{}", f"{before}[{{}}]{close}", separator=", ")
        case (before,), ():
            return replace(HERMES, open=before, close=close)
        case (before, name_end), ():
            return _calls(CallSyntax.JSON_ARGUMENTS, f"{before}{{}}{name_end}{{}}{close}")
        case (before, name_end), (_, _, _) as parameter:
            return _calls(
                CallSyntax.PARAMETERS, f"{before}{{}}{name_end}{{}}{close}", parameter="{}".join(parameter)
            )
    return None


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)
