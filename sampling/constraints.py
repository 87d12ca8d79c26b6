"""Finds constraints of a request that contradict each other, or that name tokens outside the vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Set

from quire.sampling.parameter import ParameterError, table
from quire.sampling.params import SamplingParams


def contradiction(params: SamplingParams, eos_token_ids: Set[int], vocab_size: int) -> str | None:
    """Return the parameter of the first constraint after which no first token is allowed; None if one is.

    Constraints are applied in the order allowed tokens, bad words, minimum length.

    Args:
        eos_token_ids: the model's tokens that end an answer, in addition to the request's.
        vocab_size: size of the model's logits.
    """
    allowed, banned = params.allowed_token_ids, set[int]()
    if not (allowed or params.bad_words or params.min_tokens):
        return None
    stages: tuple[tuple[str, Collection[int]], ...] = (
        ("bad_words", [word[0] for word in params.bad_words if len(word) == 1]),
        ("min_tokens", eos_token_ids | params.stop_token_ids if params.min_tokens else ()),
    )
    for name, token_ids in stages:
        banned.update(token_ids)
        if (allowed <= banned) if allowed else len(banned) >= vocab_size:
            return name
    return None


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Check that each token which a parameter names has a logit.

    Raises:
        ParameterError: a token id is not in the vocabulary.
    """
    named: dict[str, Collection[int]] = {
        "logit_bias": dict(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": [token_id for word in params.bad_words for token_id in word],
        "stop_token_ids": params.stop_token_ids,
    }
    for name, token_ids in named.items():
        if token_ids and (largest := max(token_ids)) >= vocab_size:
            path = table(SamplingParams)[name].parameter.path
            raise ParameterError(path, f"must be below {vocab_size}; got {largest}")
