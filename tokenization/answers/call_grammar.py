"""Writes the grammar of an answer with tool calls in the model's own format.

Before a call may come reasoning and, if the model decides, any text. From the mark that opens a call on, only
a call of a known tool follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.tokenization.answers.argument_grammar import Schema, written_arguments
from quire.tokenization.answers.formats import AnswerFormat, CallFormat, CallSyntax, Channels
from quire.tokenization.answers.lark import Lark, json_value, regex

BARE_OBJECT = CallFormat(CallSyntax.JSON_CALL)
"""A call as one JSON object and nothing else, for models without a format of their own."""

_TOKEN = re.compile(r"<\|[a-z_]+\|>")


class Tool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: Schema | None = None
    """JSON schema of its arguments; None: any object."""
    is_strict: bool = False
    """Whether all of its calls follow the schema. Otherwise only calls that must be made do, as far as a
    grammar can express it."""


@dataclass(frozen=True)
class CallRules:
    """Which calls an answer may have."""

    tools: Sequence[Tool]
    must_call: bool = False
    """Whether the answer is a call, after its reasoning; otherwise the model decides."""
    is_single: bool = False
    """Whether there is at most one call."""


def call_grammar(
    answer_format: AnswerFormat, rules: CallRules, token_ids: Mapping[str, int], *, in_reasoning: bool
) -> str | None:
    """Return a grammar by which every call of an answer is a call of one of the tools.

    Args:
        token_ids: ids of the tokens in ``answer_format.tokens``, without those that end an answer.
        in_reasoning: the prompt ends within reasoning.

    Returns:
        None if the model decides and nothing in its format announces a call.

    Raises:
        UnsupportedSchemaError: names a strict tool and the keyword of its schema that cannot be enforced.
    """
    lark, calls = Lark(answer_format.tokens, token_ids), answer_format.calls or BARE_OBJECT
    if rules.must_call and calls.may_begin_answer:
        calls = _without_tokens(calls)
    mark, opened = _calls(lark, calls, rules)
    if answer_format.channels is not None:
        return _with_channels(lark, answer_format.channels, mark, opened, must_call=rules.must_call)
    if rules.must_call:
        may_be_cut = calls.ends_reasoning
        before = _reasoning(lark, answer_format, in_reasoning=in_reasoning, may_be_cut=may_be_cut)
        return lark.grammar(f"{before} {lark.literal(mark)} {opened}")
    if not lark.is_announced(mark):
        return None
    begun = "thought?" if in_reasoning else ""
    lark.add("called", f"{lark.up_to(mark, 'before_call')} {opened}")
    blocks = ["called"]
    if answer_format.reasoning is not None:
        mark, _ = lark.mark(answer_format.reasoning.open)
        lark.add("thought", lark.until(answer_format.reasoning.close, "thinking"))
        lark.add("reasoned", f"{lark.up_to(mark, 'before_reasoning')} thought")
        blocks.append("reasoned")
    if rules.is_single:
        return lark.grammar(f"{begun} {' '.join(f'{each}*' for each in blocks[1:])} (text | called)")
    return lark.grammar(f"{begun} ({' | '.join(blocks)})* text")


def grammar_after_reasoning(
    answer_format: AnswerFormat, kind: str, text: str, token_ids: Mapping[str, int], *, in_reasoning: bool
) -> str:
    """Return the grammar of an answer that may reason first, and then has the format that the client chose.

    Args:
        kind: kind of that format, as in ``OutputFormat``.

    Raises:
        ValueError: the format is a JSON schema, but its text is no JSON object.
        RecursionError: the schema nests too deeply.
    """
    lark = Lark(answer_format.tokens, token_ids)
    before = _reasoning(lark, answer_format, in_reasoning=in_reasoning, may_be_cut=False)
    if kind == "json_schema":
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object")
        return lark.grammar(f"{before} {json_value(schema, is_lenient=False)}")
    if kind == "regex":
        return lark.grammar(f"{before} {regex(text)}")
    # A grammar within a grammar has names of its own.
    return lark.grammar(before + " " + lark.add("chosen", f"%lark {{\n{text}\n}}"))


def _reasoning(lark: Lark, answer_format: AnswerFormat, *, in_reasoning: bool, may_be_cut: bool) -> str:
    """Return the symbols of the reasoning before an answer's form begins, and of the blanks after it.

    Args:
        may_be_cut: a call may follow without the end of the reasoning.
    """
    if answer_format.channels is not None:
        return _channel_messages(lark, answer_format.channels, [answer_format.channels.reasoning_channel])
    if answer_format.reasoning is None:
        return ""
    thought = lark.until(answer_format.reasoning.close, "thinking")
    if may_be_cut:
        thought = f"({thought} | text)"
    if in_reasoning:
        return f"{thought} blanks"
    return f"({lark.literal(lark.mark(answer_format.reasoning.open)[0])} {thought} blanks)?"


def _with_channels(lark: Lark, channels: Channels, mark: str, opened: str, *, must_call: bool) -> str:
    """Return the grammar of an answer in the harmony format, which ends with a call or a final message."""
    before = [channels.reasoning_channel] if must_call else [channels.reasoning_channel, "commentary"]
    called = f"{lark.literal(mark)} {opened}"
    final = lark.literal(f"{channels.starts[-1]}final{channels.header_end}")
    last = called if must_call else f"({final} text | {called})"
    return lark.grammar(f"{_channel_messages(lark, channels, before)} {last}")


def _channel_messages(lark: Lark, channels: Channels, names: Sequence[str]) -> str:
    """Return the symbols of any number of messages in these channels, and of the next one's start."""
    written = []
    for name in names:
        head = lark.literal(f"{channels.starts[-1]}{name}{channels.header_end}")
        end = lark.until(channels.ends[0], f"in_{name}")
        written.append(f"{head} {end} {lark.literal(channels.prompt_end)}")
    return f"({' | '.join(written)})*"


def _calls(lark: Lark, calls: CallFormat, rules: CallRules) -> tuple[str, str]:
    """Return the mark that opens calls, and the symbols from there to the end of the last call."""
    one = lark.add(
        "call", " | ".join(_call(lark, calls, tool, must_call=rules.must_call) for tool in rules.tools)
    )
    mark, rest = lark.mark(calls.section_open or calls.open)
    opening = rest + calls.open if calls.section_open else rest
    call = f"{one} {lark.literal(calls.close)}"
    whole = f"{lark.literal(calls.section_open + calls.open)} {call}"
    section_end = lark.literal(calls.section_close)
    separator = lark.literal(calls.separator)
    if calls.is_section_per_call or not calls.section_open:
        again = f"({separator} {whole} {section_end})*"
        opened = (
            f"{lark.literal(opening)} {call} {section_end} {again if not rules.is_single and mark else ''}"
        )
    else:
        again = f"({separator} {lark.literal(calls.open)} {call})*"
        opened = f"{lark.literal(opening)} {call} {'' if rules.is_single else again} {section_end}"
    return mark, opened


def _call(lark: Lark, calls: CallFormat, tool: Tool, *, must_call: bool) -> str:
    """Return the symbols of one tool's name and arguments, between ``CallFormat.open`` and ``close``."""
    schema = tool.parameters if tool.is_strict or must_call else None
    name = calls.name_prefix + tool.name
    if calls.syntax is CallSyntax.JSON_CALL:
        head, end = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{calls.arguments_key}": ', "}"
        value = json_value(schema or {"type": "object"}, is_lenient=not tool.is_strict)
        return f"{lark.literal(head)} {value} {lark.literal(end)}"
    head = lark.literal(name)
    if calls.index_open:
        head += f" {lark.literal(calls.index_open)} /[0-9]+/"
    if calls.id_open:
        head += f" ({lark.literal(calls.id_open)} /[a-zA-Z0-9]+/)?"
    written = written_arguments(lark, calls, tool.name, schema, is_strict=tool.is_strict)
    return f"{head} {lark.literal(calls.name_end)} {written}"


def _without_tokens(calls: CallFormat) -> CallFormat:
    """Return the format with the tokens left out that an answer which begins with a call need not have."""
    opening, closing = _TOKEN.sub("", calls.section_open), _TOKEN.sub("", calls.section_close)
    return replace(calls, section_open=opening, section_close=closing)
