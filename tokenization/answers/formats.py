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


@dataclass(frozen=True)
class Channels:
    """Headers of the harmony format, which say what the text after them is.

    ::

        <|start|>assistant<|channel|>NAME to=RECIPIENT <|message|>TEXT<|end|>
    """

    starts: tuple[str, ...]
    header_end: str
    ends: tuple[str, ...]
    reasoning_channel: str
    recipient: str
    """Text before the name of a called function."""
    prompt_end: str
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


_BAR, _GAP = "\uff5c", "\u2581"


def _deepseek(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _GAP)}{_BAR}>"


def _dsml(section: str) -> CallFormat:
    mark = f"{_BAR}DSML{_BAR}"
    return CallFormat(
        CallSyntax.PARAMETERS,
        section_open=f"<{mark}{section}>\n",
        open=f'<{mark}invoke name="',
        name_end='">\n',
        parameter_open=f'<{mark}parameter name="',
        key_end='" string="true">',
        json_key_end='" string="false">',
        value_end=f"</{mark}parameter>\n",
        close=f"</{mark}invoke>\n",
        section_close=f"</{mark}{section}>",
    )


HERMES = CallFormat(CallSyntax.JSON_CALL, open="<tool_call>\n", close="\n</tool_call>", separator="\n")
QWEN_CODER = CallFormat(
    CallSyntax.PARAMETERS,
    section_open="<tool_call>\n",
    open="<function=",
    name_end=">\n",
    parameter_open="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
    close="</function>\n",
    section_close="</tool_call>",
    separator="\n",
    is_section_per_call=True,
)
LLAMA_JSON = CallFormat(
    CallSyntax.JSON_CALL,
    section_open="<|python_tag|>",
    separator="; ",
    may_begin_answer=True,
    arguments_key="parameters",
)
LLAMA_PYTHON = CallFormat(
    CallSyntax.PYTHON,
    section_open="<|python_start|>[",
    separator=", ",
    section_close="]<|python_end|>",
    may_begin_answer=True,
)
MISTRAL_LIST = CallFormat(
    CallSyntax.JSON_CALL, section_open="[TOOL_CALLS] [", separator=", ", section_close="]"
)
MISTRAL_NAMED = CallFormat(
    CallSyntax.JSON_ARGUMENTS,
    open="[TOOL_CALLS]",
    name_end="[ARGS]",
    id_open="[CALL_ID]",
    ends_reasoning=True,
)
DEEPSEEK_V3 = CallFormat(
    CallSyntax.JSON_ARGUMENTS,
    section_open=_deepseek("tool calls begin"),
    open=f"{_deepseek('tool call begin')}function{_deepseek('tool sep')}",
    name_end="\n```json\n",
    close=f"\n```{_deepseek('tool call end')}",
    separator="\n",
    section_close=_deepseek("tool calls end"),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    open=_deepseek("tool call begin"),
    name_end=_deepseek("tool sep"),
    close=_deepseek("tool call end"),
    separator="",
)
HARMONY = CallFormat(
    CallSyntax.JSON_ARGUMENTS,
    open="<|channel|>commentary to=",
    name_prefix="functions.",
    name_end=" <|constrain|>json<|message|>",
    close="<|call|>",
)
HARMONY_CHANNELS = Channels(
    starts=("<|start|>", "<|channel|>"),
    header_end="<|message|>",
    ends=("<|end|>", "<|return|>", "<|call|>"),
    reasoning_channel="analysis",
    recipient="to=",
    prompt_end="<|start|>assistant",
)
GLM = CallFormat(
    CallSyntax.PARAMETERS,
    open="<tool_call>",
    name_end="\n",
    parameter_open="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
    close="</tool_call>",
    separator="\n",
)
KIMI = CallFormat(
    CallSyntax.JSON_ARGUMENTS,
    section_open="<|tool_calls_section_begin|>",
    open="<|tool_call_begin|>",
    name_prefix="functions.",
    index_open=":",
    name_end="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    section_close="<|tool_calls_section_end|>",
    ends_reasoning=True,
)
MINIMAX = CallFormat(
    CallSyntax.PARAMETERS,
    section_open="<minimax:tool_call>\n",
    open='<invoke name="',
    name_end='">\n',
    parameter_open='<parameter name="',
    key_end='">',
    value_end="</parameter>\n",
    close="</invoke>\n",
    section_close="</minimax:tool_call>",
)
DEEPSEEK_V32, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")
FUNCTION_GEMMA = CallFormat(
    CallSyntax.KEY_VALUES,
    open="<start_function_call>call:",
    close="<end_function_call>",
    string_delimiter="<escape>",
)
GEMMA_4 = replace(FUNCTION_GEMMA, open="<|tool_call>call:", close="<tool_call|>", string_delimiter='<|"|>')
PHI_4_MINI = CallFormat(CallSyntax.JSON_CALL, section_open="functools[", separator=", ", section_close="]")
GRANITE_3 = replace(PHI_4_MINI, section_open="<|tool_call|>[")
GRANITE_31 = replace(PHI_4_MINI, section_open="<tool_call>[")

_THINK = Delimiters("<think>\n", "\n</think>")
_REASONING: tuple[tuple[str, Delimiters], ...] = (
    ("[THINK]", Delimiters("[THINK]", "[/THINK]")),
    ("<|channel>", Delimiters("<|channel>thought\n", "<channel|>")),
    ("</think>", _THINK),
    ("<think>", _THINK),
)
"""Text in a chat template's source, and the delimiters of reasoning that it shows; the first one counts."""
_CALLS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "<|message|>"), HARMONY),
    ((f"{_BAR}DSML{_BAR}", "tool_calls>"), DEEPSEEK_V4),
    ((f"{_BAR}DSML{_BAR}",), DEEPSEEK_V32),
    ((_deepseek("tool calls begin"), "```json"), DEEPSEEK_V3),
    ((_deepseek("tool calls begin"),), DEEPSEEK_V31),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<minimax:tool_call>",), MINIMAX),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<|tool_call>", "<tool_call|>"), GEMMA_4),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<arg_key>",), GLM),
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
            return replace(PHI_4_MINI, section_open=f"{before}[", section_close=f"]{close}")
        case (before,), ():
            return replace(HERMES, open=before, close=close)
        case (before, name_end), ():
            return CallFormat(CallSyntax.JSON_ARGUMENTS, open=before, name_end=name_end, close=close)
        case (before, name_end), (parameter_open, key_end, value_end):
            return CallFormat(
                CallSyntax.PARAMETERS,
                open=before,
                name_end=name_end,
                parameter_open=parameter_open,
                key_end=key_end,
                value_end=value_end,
                close=close,
            )
    return None


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from _texts(value)
