"""Tool calls in the text of an answer, whatever its pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.rpc.errors import InvalidArgument
from quire.services.router.http.openai.requests import ChatCompletionRequest
from quire.services.router.http.openai.tools import CallReader, Finished, ToolUse
from quire.tokenization.chat_template import ChatTemplate

HERMES = ChatTemplate("{{ tools }}<tool_call>{}</tool_call>", {})
PLAIN = ChatTemplate("{{ tools }}", {})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Århus"}}\n</tool_call>'


def use(choice: object = "auto") -> ToolUse:
    function = {"name": "weather", "parameters": {"type": "object"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    return ToolUse.of(ChatCompletionRequest.model_validate(body))


def read(reader: CallReader, pieces: list[str]) -> tuple[str, Finished]:
    shown = "".join(reader.feed(piece) for piece in pieces)
    return shown, reader.finish()


@given(st.lists(st.integers(0, 2 * len(CALL) + 8)))
def test_calls_are_found_however_the_text_is_split(cuts: list[int]) -> None:
    text = f"so <b> {CALL}\n{CALL}"
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    shown, (rest, calls) = read(CallReader(use(), HERMES), pieces)
    assert (shown, rest) == ("so <b> ", "")
    assert len(calls) == 2
    assert {call.function.name for call in calls} == {"weather"}
    assert json.loads(calls[0].function.arguments) == {"city": "Århus"}
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("text", ["a <tool", "<tool_call>{", "<tool_call>[]</tool_call>", "<tool_call>"])
def test_text_without_a_call_is_unchanged(text: str) -> None:
    shown, (rest, calls) = read(CallReader(use(), HERMES), list(text))
    assert (shown + rest, calls) == (text, [])


def test_calls_in_another_form_remain_text() -> None:
    shown, (rest, calls) = read(CallReader(use(), PLAIN), [CALL])
    assert (shown + rest, calls) == (CALL, [])


def test_without_tools_nothing_is_looked_for() -> None:
    assert use("none") == ToolUse()
    shown, (rest, calls) = read(CallReader(use("none"), HERMES), [CALL])
    assert (shown + rest, calls) == (CALL, [])


def test_without_parallel_calls_there_is_one_call() -> None:
    single = use()._replace(is_parallel=False)
    _, (rest, calls) = read(CallReader(single, HERMES), [f"{CALL}\n{CALL}"])
    assert (rest, len(calls)) == ("", 1)


def test_a_demanded_call_is_the_whole_answer_or_text_when_it_was_cut_off() -> None:
    whole = '{"name": "weather", "arguments": {}}'
    shown, (rest, calls) = read(CallReader(use("required"), PLAIN), list(whole))
    assert (shown, rest, [call.function.name for call in calls]) == ("", "", ["weather"])
    shown, (rest, calls) = read(CallReader(use("required"), PLAIN), [whole[:-3]])
    assert (shown, rest, calls) == ("", whole[:-3], [])


def test_a_named_tool_must_be_one_of_them() -> None:
    named = use({"type": "function", "function": {"name": "weather"}})
    assert (named.must_call, named.function) == (True, "weather")
    with pytest.raises(InvalidArgument, match="names no tool of the request: 'time'"):
        use({"type": "function", "function": {"name": "time"}})
