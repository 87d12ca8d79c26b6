"""No text has fewer tokens than its size allows."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from quire.tokenization.text_bound import most_bytes_of_a_token
from quire.tokenization.tokenizer import Tokenizer

ALPHABET = {character: at for at, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
FALLBACK = {"<unk>": 0, "\u2581abc": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}


def byte_level(normalizer: Any = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab=ALPHABET, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def fallback(normalizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
    options = {"unk_token": "<unk>", "byte_fallback": True, **options}
    made = tokenizers.Tokenizer(models.BPE(vocab=FALLBACK, merges=[], **options))
    if normalizer is not None:
        made.normalizer = normalizer
    return made


LLAMA = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
BOUNDED = {
    "byte-level": byte_level(),
    "byte-level, NFC": byte_level(normalizers.NFC()),
    "byte-level, NFKC": byte_level(normalizers.NFKC()),
    "byte fallback": fallback(LLAMA),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(
    text=st.text(max_size=60) | st.text("\u1fbe\u0308\u0301\u212b\U0001d400\u1100\u1161\u11a8 a", max_size=60)
)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    most_bytes = most_bytes_of_a_token(tokenizer)
    assert most_bytes is not None
    assert len(text.encode()) <= most_bytes * len(tokenizer.encode(text).ids)


def test_the_longest_token_counts(tokenizer: Tokenizer) -> None:
    assert most_bytes_of_a_token(fallback()) == len("\u2581abc".encode())
    assert tokenizer.most_bytes(10) == 10 * (tokenizer.most_bytes(1) or 0) > 10


def added(**options: Any) -> tokenizers.Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<x>", **options)])
    return made


def with_pre_tokenizer(*parts: Any) -> tokenizers.Tokenizer:
    made = byte_level()
    made.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel()])
    return made


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (byte_level(normalizers.Strip()), " " * 99),
        (byte_level(normalizers.Replace("aa", "b")), "a" * 99),
        (byte_level(normalizers.Replace(tokenizers.Regex(" +"), " ")), " " * 99),
        (added(lstrip=True), " " * 99 + "<x>"),
        (added(rstrip=True), "<x>" + " " * 99),
        (with_pre_tokenizer(pre_tokenizers.WhitespaceSplit()), " " * 99),
        (with_pre_tokenizer(pre_tokenizers.Split(" ", "removed")), " " * 99),
        (fallback(byte_fallback=False, fuse_unk=True), "x" * 99),
        (tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "x" * 99),
        (tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0)], unk_id=0)), "x" * 99),
    ],
)
def test_where_tokens_swallow_text_there_is_no_bound(made: tokenizers.Tokenizer, text: str) -> None:
    assert most_bytes_of_a_token(made) is None
    assert len(made.encode(text).ids) < len(text)
