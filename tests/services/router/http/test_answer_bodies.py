"""The bodies of answers as JSON: absent members are left out, and a null that was set is not."""

from __future__ import annotations

import json

import pytest

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.answer_bodies import AnswerMessage, ChatDelta, Usage, finish_name
from quire.services.router.http.shared.json_text import to_json


def test_members_that_were_not_set_are_omitted() -> None:
    delta = ChatDelta(index=0, delta=AnswerMessage(content=None), finish_reason=None)
    assert json.loads(to_json(delta)) == {"index": 0, "delta": {"content": None}, "finish_reason": None}


def test_text_is_utf_8_and_one_line() -> None:
    text = to_json(AnswerMessage(content="é\n🎉"))
    assert "é" in text.decode()
    # A line break in an event of a stream would end the event's data.
    assert b"\n" not in text
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    assert to_json(usage) == b'{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}'


@pytest.mark.parametrize("reason", pb.FinishReason.values())
def test_every_finish_reason_has_openais_name(reason: pb.FinishReason) -> None:
    names = {
        pb.FINISH_REASON_STOP: "stop",
        pb.FINISH_REASON_LENGTH: "length",
        pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
    }
    assert finish_name(reason) == names.get(reason)
    assert (finish_name(reason) is None) == (reason == pb.FINISH_REASON_UNSPECIFIED)
