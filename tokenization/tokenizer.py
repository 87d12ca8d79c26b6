"""Text to token ids and back, without torch or transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from quire.tokenization.errors import MissingTokenizerError

TOKENIZER_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
INLINE_ENCODE_CHARS = 2048
"""Texts up to this length are encoded on the event loop (below 1 ms); longer ones in a thread."""


class ModelFiles(NamedTuple):
    """The files of a model that say how to read and write its text."""

    folder: Path
    config: dict[str, Any]
    """``tokenizer_config.json``; empty where there is none."""


def load_model_files(source: str) -> ModelFiles:
    """Return the tokenizer files of a model folder or hub id; a hub id is downloaded, without the weights.

    Raises:
        MissingTokenizerError: the folder holds no ``tokenizer.json``.
    """
    folder = Path(source)
    if not folder.is_dir():
        # Imported late: it takes long, and a model folder needs no hub.
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, allow_patterns=TOKENIZER_FILES))
    if not (folder / "tokenizer.json").is_file():
        raise MissingTokenizerError(
            f"{source} has no tokenizer.json: save one with AutoTokenizer.save_pretrained"
        )
    config = folder / "tokenizer_config.json"
    return ModelFiles(folder, json.loads(config.read_text("utf-8")) if config.is_file() else {})


class Tokenizer:
    """Encodes and decodes with a model's ``tokenizer.json``."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # A saved tokenizer may carry the truncation and padding of its training; both would alter prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load ``tokenizer.json`` from a folder."""
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; ``add_special_tokens`` lets the post-processor add its own."""
        encode = partial(self.encode_batch, [text], add_special_tokens=add_special_tokens)
        (ids,) = encode() if len(text) <= INLINE_ENCODE_CHARS else await asyncio.to_thread(encode)
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of several texts; blocks, but lets other threads run."""
        # The library's encode() holds the GIL, so a thread would not help (measured: 2 MB of text stalled the
        # loop for 1.8 s); the batched call releases it.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class IncrementalDecoder:
    """Turns a growing list of ids into text deltas whose sum is the text of the whole list.

    ::

        ids   [ ... | context | pending ]       context: ids whose text was returned last
                                                pending: ids whose text is not yet certain

    The pending text is what decoding ``context + pending`` adds to decoding ``context``: some decoders treat
    the first token of a list differently. It waits while it ends with U+FFFD, as an incomplete character
    does. The library's ``DecodeStream`` works alike, but has no flush and fails for good where a decoder
    revises text it has given before, as byte fallback does for invalid UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""

    def step(self, token_id: int) -> str:
        """Take the next id and return the text that became certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith("\ufffd") or len(text) <= len(self._context_text):
            return ""
        delta = text[len(self._context_text) :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return delta

    def flush(self) -> str:
        """Return the text that still waits, as the end of the list decodes it."""
        return self._decode(self._window)[len(self._context_text) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
