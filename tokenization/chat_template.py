"""Renders a conversation with the model's own Jinja template, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.models.file_checks import damaged, read_text
from quire.tokenization.tokenizer import ModelFiles

# Errors that running a template can raise: Jinja's own, and those of its expressions over values of another
# shape than the template expects.
_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError),
    *(ArithmeticError, AttributeError, LookupError, RecursionError),
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(ValueError):
    """The model's chat template refuses the conversation; the message contains the reason."""


class ChatTemplate:
    """A compiled chat template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = source
        self.shows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        """Whether the template reads the tools of a conversation."""
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, files: ModelFiles) -> ChatTemplate | None:
        """Return a model's template, or None if it has none; ``chat_template.jinja`` takes precedence.

        Raises:
            ModelFileError: the template, or a special token, is not well formed.
        """
        own_file, path = files.folder / "chat_template.jinja", files.folder / "tokenizer_config.json"
        try:
            tokens = {name: files.config.get(name) for name in _SPECIAL_TOKENS}
            special_tokens = {name: _content(token) for name, token in tokens.items() if token}
            source = _configured(files)
            if own_file.exists():
                path, source = own_file, read_text(own_file)
            if source is not None and not source.strip():
                raise ValueError("it is empty")
            return None if source is None else cls(source, special_tokens)
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

        ``arguments`` are further variables of the template; they cannot replace the standard ones.

        Raises:
            ChatTemplateError: the template refuses the conversation.
        """
        try:
            variables = {
                **(arguments or {}),
                "messages": messages,
                "add_generation_prompt": True,
                "tools": tools or None,
                "documents": None,
                **self._special_tokens,
            }
            return self._template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(f"the model's chat template refused them: {error}") from error


def _configured(files: ModelFiles) -> str | None:
    configured = files.config.get("chat_template")
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
        configured = named.get("default")
    return configured


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
