"""Detects requests whose format and other constraints together allow no answer."""

from __future__ import annotations

from quire.engine.errors import NoTokenLeftError
from quire.engine.structured_output.logits_rules import LogitsRules

MAX_STATES = 128
"""After checking this many beginnings of answers, some answer is assumed to be possible."""
MAX_BRANCHES = 64
"""If more tokens than this may follow, some answer is assumed to be possible."""


def dead_end(
    rules: LogitsRules, prompt: list[int], vocab_size: int, stops: frozenset[int]
) -> NoTokenLeftError | None:
    """Return the error of a request whose format and other constraints together allow no answer.

    The search checks beginnings of answers until one can end, or until there are too many. None means that
    an answer is possible, or that a contradiction could only appear later.

    Args:
        rules: the rules of a sequence that has no output yet; they are not changed.
        prompt: the sequence's tokens.
        vocab_size: size of the model's logits.
        stops: tokens that end an answer.
    """
    params = rules.params
    if not (params.allowed_token_ids or params.bad_words or params.min_tokens):
        return None
    error = None
    left = [(prompt, rules)]
    for _ in range(MAX_STATES):
        if not left:
            return error
        token_ids, before = left.pop()
        here = before.copy()
        try:
            mask = here.permitted(token_ids, vocab_size, stops)
        except NoTokenLeftError as found:
            error = found
            continue
        following = [] if mask is None else mask.nonzero()[0].tolist()
        is_long = len(token_ids) + 1 >= len(prompt) + params.max_tokens
        if is_long or not 0 < len(following) <= MAX_BRANCHES or not stops.isdisjoint(following):
            return None
        left += [([*token_ids, token_id], here) for token_id in following]
    return None
