"""Says how the answers of a request are divided into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, quoted
from quire.sampling.messages import format_from_proto
from quire.sampling.output_format import OutputFormat
from quire.services.requests.prompts import read_json
from quire.services.requests.served_model import ServedModel
from quire.tokenization.answers.argument_grammar import UnsupportedSchemaError
from quire.tokenization.answers.call_grammar import (
    BARE_OBJECT,
    CallRules,
    Tool,
    call_grammar,
    grammar_after_reasoning,
)
from quire.tokenization.answers.formats import AnswerFormat
from quire.tokenization.answers.parser import AnswerParser

TAIL_TOKENS = 64
"""Number of tokens at the end of a prompt that show whether it opens or closes the reasoning."""


class Division(NamedTuple):
    """How to divide the answers of a request, and what they look like for that.

    Attributes:
        new_parser: returns a parser at the beginning of an answer.
        format: the format of the answers.
        format_field: the field of the request that an error of this format is about.
    """

    new_parser: Callable[[], AnswerParser]
    format: OutputFormat | None
    format_field: str


def divide(
    generation: pb.Generation, prompt: Sequence[int], model: ServedModel, stop_strings: Sequence[str]
) -> Division:
    """Return how to divide the answers of a request.

    Raises:
        InvalidArgument: the tools or the choice among them are not valid, or cannot go with the format.
    """
    rules, written = _rules(generation.chat), model.answer_format or AnswerFormat()
    if rules.must_call and written.calls is None:
        written = replace(written, calls=replace(BARE_OBJECT, may_begin_answer=True))
    tail = model.tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
    output_format, field = _format(generation, written, tail.rstrip(), rules, model)
    new_parser = partial(
        AnswerParser,
        written,
        prompt_tail=tail,
        schemas={tool.name: tool.parameters or {} for tool in rules.tools},
        stop_strings=stop_strings,
        min_tokens=generation.stopping.min_tokens,
        # A grammar makes sure that what begins as a call is one.
        streams_arguments=bool(rules.tools) and output_format is not None,
        max_calls=1 if rules.is_single else None,
    )
    return Division(new_parser, output_format, field)


def _rules(chat: pb.Chat) -> CallRules:
    """Return which calls a conversation allows.

    Raises:
        InvalidArgument: a tool is malformed, or the choice names none of them.
    """
    described, choice = read_json(chat.tools, list, "chat.tools"), chat.tool_choice
    tools = [_tool(tool, f"chat.tools[{at}]") for at, tool in enumerate(described)]
    if chat.HasField("tool_choice") and not tools:
        raise InvalidArgument("chat.tool_choice", "needs chat.tools to choose from")
    if missing := set(choice.names) - {tool.name for tool in tools}:
        problem = f"names no tool of the request: {quoted(min(missing))}"
        raise InvalidArgument("chat.tool_choice.names", problem)
    if choice.mode not in pb.ToolMode.values():
        raise InvalidArgument("chat.tool_choice.mode", f"is unknown: {choice.mode}")
    return CallRules(
        [tool for tool in tools if not choice.names or tool.name in choice.names],
        must_call=choice.mode == pb.TOOL_MODE_REQUIRED,
        is_single=choice.is_single,
    )


def _tool(tool: Any, field: str) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name:
        raise InvalidArgument(field, "must be an object with a name, or with a function that has one")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidArgument(field, "must have a JSON schema, an object, as its parameters")
    return Tool(name, parameters, function.get("strict") is True)


def _format(
    generation: pb.Generation, written: AnswerFormat, tail: str, rules: CallRules, model: ServedModel
) -> tuple[OutputFormat | None, str]:
    """Return the format of the answers, that of calls or what the client wants, each after the reasoning.

    Answers that need neither may ignore the end of sequence, and then have no format.
    """
    wanted, reasoning = format_from_proto(generation.format), written.reasoning
    in_reasoning = reasoning is not None and tail.endswith(reasoning.open.strip())
    if reasoning is not None and tail.endswith(reasoning.close.strip()):
        written = replace(written, reasoning=None)
    ids = model.tokenizer.added_tokens
    ids = {text: ids[text] for text in written.tokens if ids[text] not in model.eos_token_ids}
    calls = None
    if rules.tools and (rules.must_call or wanted or not generation.stopping.ignore_eos):
        forced = replace(rules, must_call=rules.must_call or wanted is not None)
        try:
            calls = call_grammar(written, forced, ids, in_reasoning=in_reasoning)
        except UnsupportedSchemaError as error:
            raise InvalidArgument("chat.tools", str(error)) from error
        except RecursionError as error:
            raise InvalidArgument("chat.tools", "must nest less deeply") from error
    if wanted is None:
        return None if calls is None else OutputFormat("grammar", calls), "chat.tools"
    field = f"format.{wanted.kind}"
    if rules.must_call:
        raise InvalidArgument("chat.tool_choice", f"cannot demand a call where the answer has {field}")
    if calls is None and written.reasoning is None and written.channels is None:
        return wanted, field
    try:
        answer = grammar_after_reasoning(written, wanted.kind, wanted.text, ids, in_reasoning=in_reasoning)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"must be JSON: {error}") from error
    if calls is not None:
        answer = f"start: call | answer\ncall: %lark {{\n{calls}}}\nanswer: %lark {{\n{answer}}}\n"
    return OutputFormat("grammar", answer), field
