"""The bodies of requests: prompts in their four forms, and what a message says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from quire.services.router.http.openai.requests import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    Message,
)


def completion(**values: Any) -> CompletionRequest:
    return CompletionRequest.model_validate_json(json.dumps(values))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_has_one_of_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], ["a", 1], [1, "a"], [[1], "a"], [-1], [1 << 32], [1.5], None, ["a"] * (MAX_PROMPTS + 1)],
)
def test_any_other_form_is_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        completion(prompt=prompt)
    assert len(completion(prompt=["a"] * MAX_PROMPTS).prompts) == MAX_PROMPTS


@pytest.mark.parametrize(
    ("echo", "max_tokens", "only_reads"),
    [(True, 0, True), (True, 1, False), (None, 0, False), (True, None, False)],
)
def test_no_tokens_and_an_echo_only_read_the_prompt(
    echo: bool | None, max_tokens: int | None, only_reads: bool
) -> None:
    assert completion(prompt="a", echo=echo, max_tokens=max_tokens).only_reads == only_reads


def test_the_text_of_a_message_is_its_parts_in_order() -> None:
    parts = [{"type": "text", "text": each} for each in ("one ", "", "two")]
    for content, text in ((parts, "one two"), ([], ""), (None, ""), ("one", "one")):
        assert Message.model_validate({"role": "user", "content": content}).text == text


def test_a_conversation_has_a_message_and_unknown_members_of_it_are_let_be() -> None:
    with pytest.raises(ValidationError):
        ChatCompletionRequest.model_validate({"messages": []})
    kept = {"role": "assistant", "content": "x", "refusal": "no", "audio": {"id": 1}}
    [message] = ChatCompletionRequest.model_validate({"messages": [kept]}).messages
    assert message.model_dump(exclude_none=True) == {"role": "assistant", "content": "x"}
