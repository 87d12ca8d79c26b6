"""Turns the bad words of a request, texts and token ids, into the token ids that are never generated."""

from __future__ import annotations

import asyncio
from functools import partial

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.server.parameters import check_at_most, check_from_one
from quire.tokenization.tokenizer import INLINE_ENCODE_CHARS, Tokenizer

MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
"""Maximum length of a bad word, in characters or in token ids."""


async def bad_words(
    params: pb.SamplingParams, tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the bad words as token ids; each text gives two, one with a space before it and one without.

    Raises:
        InvalidArgument: a bad word is out of range; the error names the field, the limit and the value.
    """
    check_at_most(MAX_BAD_WORDS, len(params.bad_words), "sampling.bad_words")
    check_at_most(MAX_BAD_WORDS, len(params.bad_word_token_ids), "sampling.bad_word_token_ids")
    words = [word.lstrip() for word in params.bad_words]
    for at, text in enumerate(words):
        check_from_one(MAX_BAD_WORD_LENGTH, len(text), f"sampling.bad_words[{at}]", "characters")
    found: dict[tuple[int, ...], None] = dict.fromkeys(await _encoded(words, tokenizer) if words else ())
    for at, token_ids in enumerate(params.bad_word_token_ids):
        field = f"sampling.bad_word_token_ids[{at}]"
        check_from_one(MAX_BAD_WORD_LENGTH, len(token_ids.ids), field, "token ids")
        if (largest := max(token_ids.ids)) >= vocab_size:
            raise InvalidArgument(field, f"must be below {vocab_size}; got {largest}")
        found[tuple(token_ids.ids)] = None
    return tuple(token_ids for token_ids in found if token_ids)


async def _encoded(words: list[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    variants = [variant for text in words for variant in (text, f" {text}")]
    encode = partial(tokenizer.encode_batch, variants, add_special_tokens=False)
    is_short = sum(map(len, variants)) <= INLINE_ENCODE_CHARS
    return list(map(tuple, encode() if is_short else await asyncio.to_thread(encode)))
