"""How a request's answers are divided: the parser, the grammar and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import ValidRequest, validate
from quire.tokenization.answers.formats import find_answer_format
from quire.tokenization.answers.pieces import Kind
from quire.tokenization.chat_template import ChatTemplate
from tests.testing.thinking_model import TEMPLATE

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"name": "g"},
]
REQUIRED = pb.TOOL_MODE_REQUIRED


@pytest.fixture
def model(model: ServedModel) -> ServedModel:
    """Return the model with room for long schemas, and with a template that has tools."""
    answer_format = find_answer_format({}, TEMPLATE, model.tokenizer.added_tokens)
    template = ChatTemplate(TEMPLATE, {})
    return replace(model, max_model_len=200_000, chat_template=template, answer_format=answer_format)


def asked(
    tools: Any = TOOLS, choice: pb.ToolChoice | None = None, thinks: bool = False, **fields: Any
) -> pb.Generation:
    chat = pb.Chat(
        messages=[pb.ChatMessage(role="user", content="x")],
        tools=json.dumps(tools) if tools else "",
        template_arguments=json.dumps({"thinks": True} if thinks else {"enable_thinking": False}),
        tool_choice=choice,
    )
    return pb.Generation(**{"chat": chat, "response": pb.ResponseOptions(parse=True), **fields})


async def format_of(generation: pb.Generation, model: ServedModel) -> tuple[str, str, ValidRequest]:
    request = await validate(generation, model)
    assert request.division is not None
    if request.format is None:
        return "", "", request
    return request.format.kind, request.format.text, request


SCHEMA = pb.ResponseFormat(json_schema='{"type": "object"}')


@pytest.mark.parametrize("thinks", [False, True])
async def test_tools_become_a_grammar_of_their_calls(model: ServedModel, thinks: bool) -> None:
    kind, grammar, request = await format_of(asked(thinks=thinks), model)
    assert (kind, request.division and request.division.format_field) == ("grammar", "chat.tools")
    assert all(each in grammar for each in ("tool_call", '\\"f\\"', '\\"g\\"'))
    _, grammar, _ = await format_of(asked(choice=pb.ToolChoice(mode=REQUIRED, names=["g"])), model)
    assert ('\\"f\\"' in grammar, '\\"g\\"' in grammar) == (False, True)


async def test_an_answer_that_ignores_its_end_has_no_grammar_unless_a_call_is_demanded(
    model: ServedModel,
) -> None:
    stopping = pb.StoppingParams(ignore_eos=True)
    assert (await format_of(asked(stopping=stopping), model))[0] == ""
    with pytest.raises(InvalidArgument) as refused:
        await validate(asked(choice=pb.ToolChoice(mode=REQUIRED), stopping=stopping), model)
    assert refused.value.field == "stopping.ignore_eos"


async def test_a_format_follows_the_reasoning_or_stands_beside_calls(model: ServedModel) -> None:
    assert (await format_of(asked(tools=None, format=SCHEMA), model))[:2] == (
        "json_schema",
        SCHEMA.json_schema,
    )
    kind, grammar, request = await format_of(asked(tools=None, format=SCHEMA, thinks=True), model)
    assert (kind, "</think>" in grammar) == ("grammar", True)
    assert request.division is not None
    assert request.division.format_field == "format.json_schema"
    kind, grammar, _ = await format_of(asked(format=SCHEMA), model)
    assert (kind, "tool_call" in grammar, "answer: %lark" in grammar) == ("grammar", True, True)


async def test_a_model_without_a_format_of_its_own_calls_with_an_object(model: ServedModel) -> None:
    model.answer_format = None
    assert (await format_of(asked(), model))[0] == ""
    _, grammar, request = await format_of(asked(choice=pb.ToolChoice(mode=REQUIRED, is_single=True)), model)
    assert "tool_call" not in grammar
    assert request.division is not None
    parser = request.division.new_parser()
    pieces = [*parser.feed('{"name": "f", "arguments": {"a": 1}}'), *parser.finish()]
    assert [(piece.kind, piece.name) for piece in pieces if piece.text] == [(Kind.CALL, "f")]


async def test_the_end_of_any_prompt_says_whether_the_answer_begins_in_reasoning(model: ServedModel) -> None:
    token_ids = await model.tokenizer.encode("<think>")
    for fields in ({"text": "x <think>\n"}, {"token_ids": pb.TokenIds(ids=token_ids)}):
        generation = pb.Generation(response=pb.ResponseOptions(parse=True), **fields)
        request = await validate(generation, model)
        assert request.division is not None
        parser = request.division.new_parser()
        [piece] = [each for each in (*parser.feed("so"), *parser.finish()) if each.text]
        assert piece.kind is Kind.REASONING


async def test_a_conversation_that_was_rendered_before_is_not_rendered_again(model: ServedModel) -> None:
    generation = asked()
    generation.chat.rendered.ids.extend([5, 6, 7])
    with pytest.raises(InvalidArgument) as refused:
        await validate(generation, model)
    assert refused.value.field == "chat.rendered"
    generation.received.add(token_ids=[5])
    generation.origin, generation.sampling.seed = model.origin(b"tiny", ""), 3
    assert (await validate(generation, model)).prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize(
    ("generation", "field", "problem"),
    [
        (asked(None, pb.ToolChoice(mode=REQUIRED)), "chat.tool_choice", "needs chat.tools"),
        (
            asked(choice=pb.ToolChoice(names=["h"])),
            "chat.tool_choice.names",
            "names no tool of the request: 'h'",
        ),
        (asked(choice=pb.ToolChoice(), response=pb.ResponseOptions()), "chat.tool_choice", "response.parse"),
        (asked(choice=pb.ToolChoice(mode=9)), "chat.tool_choice.mode", "unknown"),  # type: ignore[arg-type]
        (asked(choice=pb.ToolChoice(mode=REQUIRED), format=SCHEMA), "chat.tool_choice", "format.json_schema"),
        (asked([7]), "chat.tools[0]", "must be an object with a name"),
        (asked([{"function": {"name": ""}}]), "chat.tools[0]", "must be an object with a name"),
        (asked([{"name": "f", "parameters": []}]), "chat.tools[0]", "must have a JSON schema"),
        (
            asked(None, thinks=True, format=pb.ResponseFormat(json_schema="{")),
            "format.json_schema",
            "must be JSON",
        ),
        (
            asked(None, thinks=True, format=pb.ResponseFormat(json_schema="[]")),
            "format.json_schema",
            "a schema is an object",
        ),
        (asked([{"name": "f" * 70_000}]), "chat.tools", "from 1 to 65536 bytes"),
    ],
)
async def test_impossible_combinations_are_refused_by_name(
    model: ServedModel, generation: pb.Generation, field: str, problem: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await validate(generation, model)
    assert refused.value.field == field
    assert problem in refused.value.problem


@pytest.mark.parametrize("is_tool", [True, False])
async def test_schemas_that_nest_too_deeply_are_refused_by_name(model: ServedModel, is_tool: bool) -> None:
    """Reading and writing JSON fail at different depths, which depend on the stack of the caller."""
    refused = set()
    for depth in range(700, 1000):
        schema = '{"not":' * depth + "{}" + "}" * depth
        generation = asked(None, thinks=True)
        if is_tool:
            generation.chat.tools = f'[{{"name": "f", "parameters": {schema}}}]'
        else:
            generation.format.json_schema = schema
        try:
            await validate(generation, model)
        except InvalidArgument as error:
            refused.add(error.field)
    # A chat template cannot show tools that nest too deeply.
    assert refused <= ({"chat.tools", "chat.messages"} if is_tool else {"format.json_schema"})
    assert refused
