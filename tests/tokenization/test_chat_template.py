"""Chat templates: what messages say is data, and what a template may do is little."""

from __future__ import annotations

from typing import Any

import pytest

from quire.tokenization.chat_template import ChatTemplate, ChatTemplateError

PLAIN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
INJECTIONS = [
    "{{ 7 * 7 }}",
    "{% for i in range(3) %}x{% endfor %}",
    "{{ messages }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{# gone #}",
    "{% raw %}",
    "%}{{ 7 * 7 }}{%",
    "{{ raise_exception('out') }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "\x00{{1}}\r\n",
]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('true') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ (messages | attr('append')).__func__ }}",
    "{{ '%s'.format.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
]
CHANGES = ["{{ messages.append(1) }}", "{{ messages[0].update(role='system') }}", "{{ messages.clear() }}"]


@pytest.mark.parametrize("content", INJECTIONS)
@pytest.mark.parametrize("field", ["role", "content"])
def test_the_text_of_a_message_is_never_evaluated(field: str, content: str) -> None:
    message = {"role": "user", "content": "hello", field: content}
    assert ChatTemplate(PLAIN, {}).render([message]) == f"[{message['role']}]{message['content']}"


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_nothing_beyond_the_conversation(source: str) -> None:
    try:
        rendered = ChatTemplate(source, {}).render([{"role": "user", "content": "hello"}])
    except ChatTemplateError:
        return
    assert not any(word in rendered for word in ("class", "module", "object", "function", "cell"))


@pytest.mark.parametrize("source", CHANGES)
def test_a_template_changes_no_message(source: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(messages)
    assert messages == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ messages[7].role.upper() }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_refuses_the_conversation(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render([])


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


CALLS = (
    "{% for message in messages %}{% for call in message.tool_calls %}"
    "{% if call.id|length != 9 %}{{ raise_exception('length 9') }}{% endif %}{{ call.id }} {% endfor %}"
    "{% if message.role == 'tool' %}{{ message.tool_call_id }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call_id", ["call_2c14994d278535fba8002440", "x", "ab-cd-efg", "a" * 9, "\ud800"])
def test_mistrals_templates_get_ids_of_nine_letters_and_digits(call_id: str) -> None:
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "", "tool_call_id": call_id},
    ]
    call, result = ChatTemplate(CALLS, {}).render(messages).split(" ")
    assert call == result
    assert len(call) == 9
    assert call.isalnum()
    assert (call == call_id) == (call_id == "a" * 9)
    assert ChatTemplate("{{ messages[1].tool_call_id }}", {}).render(messages) == call_id


HARMONY = (
    "{% for message in messages %}{% if message.content and message.thinking and message.tool_calls %}"
    "{{ raise_exception('not both') }}{% endif %}<{{ message.thinking }}|{{ message.content }}>{% endfor %}"
)


def test_a_template_that_reads_thinking_gets_the_reasoning() -> None:
    reasoning = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    template = ChatTemplate(HARMONY, {})
    assert template.render([reasoning]) == "<hm|so>"
    assert template.render([{**reasoning, "tool_calls": [{"id": "x"}]}]) == "<hm\n\nso|>"
    assert template.render([{"role": "assistant", "content": "so"}]) == "<|so>"


def test_a_template_for_tools_renders_only_conversations_with_tools() -> None:
    template = ChatTemplate("plain", {}, with_tools="{{ tools | tojson }}")
    assert template.shows_tools
    assert template.render([]) == "plain"
    assert template.render([], [{"a": 1}]) == '[{"a": 1}]'
    assert "plain" in template.source
    assert "tojson" in template.source


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '>' + tool['function']['arguments'] + '<' }}", '>{"a": "\u00fc"}<'),
        ("{{ '>' + tool.function.arguments }}", '>{"a": "\u00fc"}'),
        ("{{ '>' + tool['function']['arguments'] | tojson }}", '>{"a": "\u00fc"}'),
        ("{{ tool.function.arguments.a }}", "\u00fc"),
    ],
)
def test_deepseeks_templates_get_arguments_as_text(source: str, text: str) -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": "\u00fc"}}}]
    template = ChatTemplate("{% for tool in messages[0].tool_calls %}" + source + "{% endfor %}", {})
    assert template.render([{"role": "assistant", "content": "", "tool_calls": calls}]) == text
