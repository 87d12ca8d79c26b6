"""Renders a conversation with the model's own Jinja template, as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.models.file_checks import damaged, read_object, read_text
from quire.tokenization.tokenizer import ModelFiles

# Errors that running a template can raise: Jinja's own, and those of its expressions over values of another
# shape than the template expects.
_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError),
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
)
_SHORT_IDS = re.compile(r"id\s*\|\s*length\)?\s*!=\s*9\b")
"""How a template of Mistral's refuses the ids of calls that have not nine letters and digits."""
_TEXT_ARGUMENTS = re.compile(r"\+\s*\w+(\['function'\]|\.function)(\['arguments'\]|\.arguments)(?!\s*\|)")
"""How a template of DeepSeek's appends the arguments of a call, which then must be text."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(ValueError):
    """The model's chat template refuses the conversation; the message contains the reason."""


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name.

    Attributes:
        source: the template; if there is another one for conversations with tools, both.
        shows_tools: whether the template reads the tools of a conversation.

    Args:
        with_tools: the template of conversations with tools, if it is another one.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        environment = _environment()
        with_tools = source if with_tools is None else with_tools
        self.source = source if with_tools == source else source + with_tools
        self.shows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(with_tools))
        self._template = environment.from_string(source)
        self._with_tools = environment.from_string(with_tools)
        self._special_tokens = dict(special_tokens)
        self._has_short_ids = _SHORT_IDS.search(self.source) is not None
        self._has_text_arguments = _TEXT_ARGUMENTS.search(self.source) is not None
        self._reads_thinking = "message.thinking" in self.source

    @classmethod
    def load(cls, files: ModelFiles) -> ChatTemplate | None:
        """Return a model's template, or None if it has none; ``chat_template.jinja`` takes precedence.

        The special tokens of ``special_tokens_map.json`` take precedence in folders that have no
        ``added_tokens_decoder`` yet, as in transformers.

        Raises:
            ModelFileError: the template, or a special token, is not well formed.
        """
        own_file, path = files.folder / "chat_template.jinja", files.folder / "tokenizer_config.json"
        tools_file = files.folder / "additional_chat_templates" / "tool_use.jinja"
        config, older_file = files.config, files.folder / "special_tokens_map.json"
        if "added_tokens_decoder" not in config and older_file.exists():
            config = {**config, **read_object(older_file)}
        try:
            tokens = {name: config.get(name) for name in _SPECIAL_TOKENS}
            special_tokens = {name: _content(token) for name, token in tokens.items() if token}
            source, with_tools = _configured(files)
            if own_file.exists():
                path, source = own_file, read_text(own_file)
                with_tools = read_text(tools_file) if tools_file.exists() else None
            if source is not None and not source.strip():
                raise ValueError("it is empty")
            return None if source is None else cls(source, special_tokens, with_tools)
        except _TEMPLATE_ERRORS as error:
            raise damaged(path, f"has no usable chat template or special tokens ({error})") from error

    @cached_property
    def allows_late_system(self) -> bool:
        """Whether a conversation may have a system message after its first message."""
        roles = ("system", "user", "system", "user")
        try:
            self.render([{"role": role, "content": "text"} for role in roles])
        except ChatTemplateError:
            return False
        return True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that asks the assistant for its next message.

        Args:
            messages: each with a role and a content; with OpenAI's names of tool calls and their results, and
                with earlier reasoning as ``reasoning_content``.
            tools: descriptions of functions.
            arguments: further variables of the template; they cannot replace the standard ones.

        Raises:
            ChatTemplateError: the template refuses the conversation.
        """
        try:
            variables = {
                **(arguments or {}),
                "messages": [self._adapted(message) for message in messages],
                "add_generation_prompt": True,
                "tools": tools or None,
                "documents": None,
                **self._special_tokens,
            }
            return (self._with_tools if tools else self._template).render(variables)
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(f"the model's chat template refused them: {error}") from error

    def _adapted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with the names and the ids that this template expects."""
        if self._has_short_ids:
            if isinstance(result_of := message.get("tool_call_id"), str):
                message = {**message, "tool_call_id": _short_id(result_of)}
            if calls := message.get("tool_calls"):
                short = [{**call, "id": _short_id(call["id"])} if call.get("id") else call for call in calls]
                message = {**message, "tool_calls": short}
        if self._has_text_arguments and (calls := message.get("tool_calls")):
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}
        if self._reads_thinking and (reasoning := message.get("reasoning_content")):
            message = {**message, "thinking": reasoning}
            if message.get("tool_calls") and (content := message.get("content")):
                # The template of gpt-oss has only one of both beside a call.
                message = {**message, "thinking": f"{reasoning}\n\n{content}", "content": ""}
        return message


def _configured(files: ModelFiles) -> tuple[str | None, str | None]:
    """Return the template of ``tokenizer_config.json``, and the one that it has for tools, if any."""
    configured = files.config.get("chat_template")
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
        return named.get("default"), named.get("tool_use")
    return configured, None


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _short_id(call_id: str) -> str:
    """Return nine letters and digits for the id of a call: the id itself if it has this form."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks the assistant's text for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Return a value as JSON; replaces Jinja's own filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
