"""A bound on the text that one token can stand for, which shows that a text is too long for a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models

SHRINKING = 8
"""Most bytes of text that a Unicode normal form turns into one byte.

A composed character has at least two bytes, and comes from at most four characters of at most four bytes
each. Any other change turns one character into at least one character.
"""
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})


def most_bytes_of_a_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the most bytes of text that one token stands for, or None if there is no such number.

    There is none if a normalizer drops text, a pre-tokenizer drops spaces, an added token absorbs the spaces
    beside it, or one token stands for any number of unknown characters. Kinds of normalizers and
    pre-tokenizers that are not listed in this file are assumed to drop text.
    """
    shrinking = _shrinking(_settings(tokenizer.normalizer))
    is_kept = _keeps_text(_settings(tokenizer.pre_tokenizer)) and _knows_all_bytes(tokenizer)
    added = tokenizer.get_added_tokens_decoder().values()
    if shrinking is None or not is_kept or any(token.lstrip or token.rstrip for token in added):
        return None
    # In byte-level vocabularies each byte is a character of one or two bytes, so the bound may be too high,
    # which is safe.
    return shrinking * max(len(token.encode()) for token in tokenizer.get_vocab())


def _settings(part: Any) -> Mapping[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return how many bytes of the original text one byte of normalized text can stand for."""
    match normalizer:
        case None | {"type": "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(new.encode()) >= len(old.encode()) else None
        case {"type": str(name)} if name in _FORMS:
            return SHRINKING
        case {"type": "Sequence", "normalizers": list(parts)}:
            product = 1
            for part in map(_shrinking, parts):
                if part is None:
                    return None
                product *= part
            return product
    return None


def _keeps_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case None:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return all(map(_keeps_text, parts))
        case {"type": str(name)}:
            return name in _KEEPING_PRE_TOKENIZERS
    return False


def _knows_all_bytes(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether a character that is in no token becomes its bytes, one token each."""
    model, vocab = tokenizer.model, tokenizer.get_vocab()
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    parts = f"{_settings(tokenizer.normalizer)} {_settings(tokenizer.pre_tokenizer)}"
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return "'ByteLevel'" in parts and all(byte in vocab for byte in alphabet)
