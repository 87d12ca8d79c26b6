"""What a template gets in addition to messages with a role and a text."""

from __future__ import annotations

import pytest

from quire.tokenization.chat_template import ChatTemplate, ChatTemplateError


def test_a_template_shows_tools_and_further_variables() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ mood }}{{ messages[0].tool_calls[0].id }}", {})
    assert template.shows_tools
    assert template.render([{"tool_calls": [{"id": 7}]}], [{"a": 1}], {"mood": "!"}) == '[{"a": 1}]!7'


def test_a_variable_cannot_replace_a_built_in_one() -> None:
    template = ChatTemplate("{{ bos_token }}{{ add_generation_prompt }}", {"bos_token": "<s>"})
    assert not template.shows_tools
    assert template.render([], (), {"bos_token": "x", "add_generation_prompt": "x"}) == "<s>True"


def test_a_message_of_another_shape_is_refused() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.name.upper() }}", {})
    with pytest.raises(ChatTemplateError):
        template.render([{"tool_calls": [{"function": {}}]}])
