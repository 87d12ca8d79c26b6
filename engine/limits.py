"""Limits of what a request may ask for. This file does not import torch, since routers check requests too."""

from __future__ import annotations

from collections.abc import Collection, Set

MAX_SEQUENCES = 64
"""Most sequences of one request."""

MAX_LOGIT_BIASES = 1024
"""Most tokens of one request that may have a bias."""

MAX_TEMPERATURE = 1e6
"""Highest temperature; far below it all tokens are already almost equally probable."""

MAX_LENGTH_PENALTY = 10.0
"""Largest magnitude of a length penalty; a length to a higher power may overflow floating-point numbers."""

MAX_LOGPROBS = 20
"""Most top tokens whose logprobs are reported with each token."""

MIN_BUDGET_BLOCKS = 3
"""Fewest blocks of a KV budget: the one being filled, the newest full one, and one that is chosen."""


def contradiction(
    vocab_size: int,
    allowed: Set[int],
    bad_words: Collection[Collection[int]],
    stops: Set[int],
    min_tokens: int,
) -> str | None:
    """Return the field of the first constraint after which no first token is allowed; None if one is.

    Constraints are applied in the order allowed tokens, bad words, minimum length.

    Args:
        vocab_size: size of the model's logits.
        allowed: ``allowed_token_ids``; empty means all.
        bad_words: token sequences that are never generated.
        stops: tokens that end an answer, which are forbidden before ``min_tokens``.
        min_tokens: fewest tokens of an answer.
    """
    banned: set[int] = set()
    stages: tuple[tuple[str, Collection[int]], ...] = (
        ("bad_words", [token_id for word in bad_words if len(word) == 1 for token_id in word]),
        ("min_tokens", stops if min_tokens else ()),
    )
    for field, token_ids in stages:
        banned.update(token_ids)
        if (allowed <= banned) if allowed else len(banned) >= vocab_size:
            return field
    return None
