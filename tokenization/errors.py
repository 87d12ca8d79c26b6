"""What can be wrong with a model's text files, or with what is given to them."""

from __future__ import annotations


class MissingTokenizerError(ValueError):
    """The model has no tokenizer that can be read here; the message says how to make one."""


class ChatTemplateError(ValueError):
    """The model's chat template refuses the conversation; the message holds its reason."""
