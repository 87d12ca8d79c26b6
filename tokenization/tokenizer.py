"""Converts text to token ids and back, without torch or transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from quire.models.file_checks import damaged, read_object
from quire.models.source import GENERATION_CONFIG, TOKENIZER_FILES, find_model
from quire.tokenization.text_bound import most_bytes_of_a_token

INLINE_ENCODE_CHARS = 2048
"""Texts up to this length are encoded on the event loop (below 1 ms); longer ones in a thread."""
LONG_TEXT_CHARS = 128 << 10
"""Texts beyond this length (0.1 s) are encoded in separate threads and wait only for each other."""
LONG_TEXTS_AT_ONCE = 2
INLINE_DECODE_IDS = 1024
MAX_WAITING_IDS = 8
"""Most ids whose text an ``IncrementalDecoder`` holds back completely."""
MAX_WAITING_CHARS = 3
"""Most characters that it holds back with more ids; each may be one byte of an incomplete character."""
IDS_AT_ONCE = 32
"""Most ids that it decodes together; the next ones are decoded after them."""
KEPT_IDS = 12
"""Newest ids that it keeps then. They have more bytes than the characters held back can have."""
_REPLACEMENT = "\ufffd"


class MissingTokenizerError(ValueError):
    """The model has no tokenizer that quire can read; the message says how to make one."""


class TooManyTokensError(ValueError):
    """A text has more tokens than were allowed."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(f"the text has {num_tokens} tokens, more than {limit}")
        self.num_tokens = num_tokens


class ModelFiles(NamedTuple):
    """The files of a model that say how to read and write its text, and how its authors sample it."""

    folder: Path
    config: dict[str, Any]
    """Contents of ``tokenizer_config.json``; empty if there is no such file."""


def load_model_files(source: str) -> ModelFiles:
    """Return the tokenizer files of a model folder or hub id; a hub id is downloaded, without the weights.

    Raises:
        MissingTokenizerError: the folder holds no ``tokenizer.json``.
        ModelFileError: ``tokenizer_config.json`` is damaged.
        OSError: there is no such model.
    """
    folder = find_model(source, (*TOKENIZER_FILES, GENERATION_CONFIG))
    if not (folder / "tokenizer.json").is_file():
        raise MissingTokenizerError(
            f"{source} has no tokenizer.json: save one with AutoTokenizer.save_pretrained"
        )
    config = folder / "tokenizer_config.json"
    return ModelFiles(folder, read_object(config) if config.exists() else {})


class Tokenizer:
    """Encodes and decodes with a model's ``tokenizer.json``."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A saved tokenizer may carry the truncation and padding of its training; both would alter prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._long_texts = ThreadPoolExecutor(LONG_TEXTS_AT_ONCE, thread_name_prefix="long-text")
        self._most_bytes = most_bytes_of_a_token(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Ids of the added tokens, special or not, by their texts."""
        # The same tokens come many times; decoding them each time would be most of the work of logprobs.
        self._texts: dict[int, str] = {}
        self._known_ids: set[int] = set()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.joins_bytes = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        """Whether a text is the bytes of its tokens: then texts of whole characters can be joined."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load ``tokenizer.json`` from a folder.

        Raises:
            ModelFileError: the file is damaged.
        """
        path = folder / "tokenizer.json"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other type
            raise damaged(path, f"is not a tokenizer ({error})") from error
        return cls(tokenizer)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text; ``add_special_tokens`` lets the post-processor add special tokens.

        Raises:
            TooManyTokensError: there are more than ``max_tokens``.
        """
        encode = partial(self._encode, text, add_special_tokens, max_tokens)
        if len(text) <= INLINE_ENCODE_CHARS:
            return encode()
        executor = self._long_texts if len(text) > LONG_TEXT_CHARS else None
        # If the caller is cancelled while its text waits for a thread, the text is not encoded.
        return await asyncio.get_running_loop().run_in_executor(executor, encode)

    def most_bytes(self, num_tokens: int) -> int | None:
        """Return the most bytes that a text of ``num_tokens`` tokens can have; None if there is no bound."""
        return None if self._most_bytes is None else self._most_bytes * num_tokens

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        # The library's encode() holds the GIL, so a thread would not help (measured: 2 MB of text stalled the
        # loop for 1.8 s); the batched call releases it.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            # Raise before building the list: a list of millions of ids holds the GIL for 50 ms.
            raise TooManyTokensError(len(encoding), max_tokens)
        return encoding.ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of several texts; blocks, but lets other threads run."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; with many ids it blocks, but lets other threads run."""
        if len(token_ids) <= INLINE_DECODE_IDS:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # Only the batched call releases the GIL, and a million ids take half a second.
        [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def text_of(self, token_id: int) -> str:
        """Return the text of a single token; of a part of a character, U+FFFD."""
        if token_id not in self._texts:
            self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._texts[token_id]

    def are_ordinary(self, token_ids: Sequence[int]) -> bool:
        """Return whether all ids have text and none is special; False if one of them is not known yet."""
        return self._known_ids.issuperset(token_ids)

    def is_special(self, token_id: int) -> bool:
        """Return whether an id is that of a special token."""
        return token_id in self._special_ids

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Return whether ``decode`` uses an id; it ignores skipped special tokens and unknown ids."""
        if token_id in self._special_ids:
            return not skip_special_tokens
        if token_id not in self._known_ids and self._tokenizer.id_to_token(token_id) is not None:
            self._known_ids.add(token_id)
        return token_id in self._known_ids


class IncrementalDecoder:
    """Turns a growing list of ids into text deltas whose sum is the text of the whole list.

    ::

        ids    [ ... | window                        ]       window: the newest ids, at most about fifty
        text          [ shown            | new       ]       new: text that was not returned yet

    The window begins before the new text, because some decoders treat the first token of a list differently.
    New text waits while it ends with U+FFFD, as an incomplete character does. After ``MAX_WAITING_IDS`` ids
    only its end waits, since a character has at most four bytes. The cost of a step therefore does not depend
    on the number of ids.

    The sum differs from the text of the whole list only if byte fallback decodes invalid UTF-8. It then also
    replaces valid characters next to the invalid bytes, which may have been returned already.

    The library's ``DecodeStream`` works in the same way, but has no flush, and fails permanently if a decoder
    revises text that it returned before.

    Args:
        before: the id before the first one, if their text continues its text. Some decoders drop the space
            that a list begins with, as that of Llama 2.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, before: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._shown = ""
        self._num_waiting = 0
        if before is not None and tokenizer.has_text(before, skip_special_tokens=skip_special_tokens):
            text = tokenizer.text_of(before)
            if _REPLACEMENT not in text:
                self._window, self._shown = [before], text
        self._before = self._window, self._shown, self._num_waiting

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next ids and return the text that became certain, as ``step`` does for each.

        Ids whose text has no U+FFFD are decoded together: they end with a whole character, and their text is
        that of their steps.
        """
        self._before = self._window, self._shown, self._num_waiting
        text = self._feed(token_ids[:IDS_AT_ONCE])
        for start in range(IDS_AT_ONCE, len(token_ids), IDS_AT_ONCE):
            text += self._feed(token_ids[start : start + IDS_AT_ONCE])
        return text

    def divide(self, token_ids: Sequence[int], text: str) -> list[str]:
        """Return the text that the last call of ``feed`` returned for these ids, as ``step`` divides it."""
        texts = list(map(self._tokenizer.text_of, token_ids))
        # Most tokens have the same text everywhere.
        if _REPLACEMENT not in text and "".join(texts) == text:
            return texts
        self._window, self._shown, self._num_waiting = self._before
        return list(map(self.step, token_ids))

    def _feed(self, token_ids: Sequence[int]) -> str:
        tokenizer, skips = self._tokenizer, self._skip_special_tokens
        if not tokenizer.are_ordinary(token_ids):
            token_ids = [each for each in token_ids if tokenizer.has_text(each, skip_special_tokens=skips)]
        elif tokenizer.joins_bytes and not self._num_waiting:
            new = "".join(map(tokenizer.text_of, token_ids))
            if new and _REPLACEMENT not in new:
                self._window = [token_ids[-1]]
                self._shown = tokenizer.text_of(token_ids[-1])
                return new
        window = [*self._window, *token_ids]
        num_waiting = self._num_waiting + len(window) - len(self._window)
        text = self._decode(window)
        new = text[len(self._shown) :]
        if not new or _REPLACEMENT in new or not text.startswith(self._shown):
            return "".join(map(self.step, token_ids))
        self._window = window
        # One id suffices unless it is the end of a character.
        self._keep(num_waiting if _REPLACEMENT in tokenizer.text_of(window[-1]) else 1)
        self._num_waiting = 0
        return new

    def step(self, token_id: int) -> str:
        """Take the next id and return the text that became certain."""
        if not self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        self._window = [*self._window, token_id]
        self._num_waiting += 1
        new = self._new_text()
        if new and not new.endswith(_REPLACEMENT):
            self._keep(self._num_waiting)
            self._num_waiting = 0
            return new
        if self._num_waiting <= MAX_WAITING_IDS:
            return ""
        num_certain = max(len(new.rstrip(_REPLACEMENT)), len(new) - MAX_WAITING_CHARS)
        self._keep(KEPT_IDS)
        if not self._shown.endswith(new[num_certain:]):
            # Byte fallback decodes valid characters at the end of a text that is invalid as a whole.
            num_certain = len(new)
        self._num_waiting = len(new) - num_certain
        self._shown = self._shown[: len(self._shown) - self._num_waiting]
        return new[:num_certain]

    def flush(self) -> str:
        """Return the text that still waits, decoded as the end of the list."""
        return self._new_text()

    def _new_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # Byte fallback has revised text that was shown: the new bytes are invalid, so decode them separately.
        return self._decode(self._window[-self._num_waiting :]) if self._num_waiting else ""

    def _keep(self, num_ids: int) -> None:
        """Shorten the window to its newest ids, and regard all of their text as shown."""
        self._window = window = self._window[-num_ids:]
        self._shown = self._tokenizer.text_of(window[0]) if len(window) == 1 else self._decode(window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
