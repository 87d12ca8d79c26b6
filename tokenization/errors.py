"""Errors of a model's text files, and of the texts that are given to them."""

from __future__ import annotations


class MissingTokenizerError(ValueError):
    """The model has no tokenizer that quire can read; the message says how to make one."""


class ChatTemplateError(ValueError):
    """The model's chat template refuses the conversation; the message contains the reason."""


class TooManyTokensError(ValueError):
    """A text has more tokens than were allowed."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens, more than {limit}")
        self.num_tokens = num_tokens
