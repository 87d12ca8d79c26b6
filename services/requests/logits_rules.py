"""Checks a request's rules for the logits: penalties, biases, allowed tokens, bad words."""

from __future__ import annotations

import asyncio
from functools import partial

from quire.engine.limits import MAX_LOGIT_BIASES
from quire.protos import inference_pb2 as pb
from quire.services.server.errors import InvalidArgument
from quire.tokenization.tokenizer import INLINE_ENCODE_CHARS, Tokenizer

MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
"""Maximum length of a bad word, in characters or in token ids."""


async def logits_rules(params: pb.SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> pb.SamplingParams:
    """Return the rules that the request sets, in the form for workers, with bad words as token ids.

    Raises:
        InvalidArgument: a rule is out of range; the error names the field, the limit and the value.
    """
    _check_penalties(params)
    _check_biases(params, vocab_size)
    _check_number("sampling.allowed_token_ids", len(params.allowed_token_ids), vocab_size)
    _check_token_id(max(params.allowed_token_ids, default=0), vocab_size, "sampling.allowed_token_ids")
    rules = pb.SamplingParams(
        logit_bias=params.logit_bias,
        allowed_token_ids=sorted(set(params.allowed_token_ids)),
        bad_word_token_ids=await _bad_words(params, tokenizer, vocab_size),
    )
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        if params.HasField(name):
            setattr(rules, name, getattr(params, name))
    return rules


def _check_penalties(params: pb.SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -2 <= value <= 2:
            raise InvalidArgument(f"sampling.{name}", f"must be from -2 to 2; got {value:g}")
    repetition = params.repetition_penalty
    # In single precision, 0.01 is slightly less than in double precision.
    if params.HasField("repetition_penalty") and not 0.01 - 1e-9 <= repetition <= 100:
        raise InvalidArgument("sampling.repetition_penalty", f"must be from 0.01 to 100; got {repetition:g}")


def _check_biases(params: pb.SamplingParams, vocab_size: int) -> None:
    _check_number("sampling.logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    _check_token_id(max(params.logit_bias, default=0), vocab_size, "sampling.logit_bias")
    for token_id, bias in params.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidArgument(
                f"sampling.logit_bias[{token_id}]", f"must be from -100 to 100; got {bias:g}"
            )


async def _bad_words(params: pb.SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> list[pb.TokenIds]:
    """Return the bad words as token ids; each text gives two, one with a space before it and one without."""
    _check_number("sampling.bad_words", len(params.bad_words), MAX_BAD_WORDS)
    _check_number("sampling.bad_word_token_ids", len(params.bad_word_token_ids), MAX_BAD_WORDS)
    words = [word.lstrip() for word in params.bad_words]
    for at, text in enumerate(words):
        _check_length(f"sampling.bad_words[{at}]", len(text), "characters")
    variants = [variant for text in words for variant in (text, f" {text}")]
    encode = partial(tokenizer.encode_batch, variants, add_special_tokens=False)
    is_short = sum(map(len, variants)) <= INLINE_ENCODE_CHARS
    encoded = encode() if is_short else await asyncio.to_thread(encode)
    found: dict[tuple[int, ...], None] = dict.fromkeys(map(tuple, encoded))
    for at, token_ids in enumerate(params.bad_word_token_ids):
        field = f"sampling.bad_word_token_ids[{at}]"
        _check_length(field, len(token_ids.ids), "token ids")
        _check_token_id(max(token_ids.ids), vocab_size, field)
        found[tuple(token_ids.ids)] = None
    return [pb.TokenIds(ids=token_ids) for token_ids in found if token_ids]


def _check_token_id(token_id: int, vocab_size: int, field: str) -> None:
    if token_id >= vocab_size:
        raise InvalidArgument(field, f"must be below {vocab_size}; got {token_id}")


def _check_number(field: str, number: int, limit: int) -> None:
    if number > limit:
        raise InvalidArgument(field, f"must be at most {limit}; got {number}", metadata={"limit": str(limit)})


def _check_length(field: str, length: int, unit: str) -> None:
    if not 1 <= length <= MAX_BAD_WORD_LENGTH:
        raise InvalidArgument(field, f"must hold from 1 to {MAX_BAD_WORD_LENGTH} {unit}; got {length}")
