"""Decides which revisions of the served model receive requests while workers of several revisions run.

A revision is what prefill and decode workers must share to work together: weights, block layout, arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def receiving(prefill: Collection[str], decode: Sequence[str]) -> list[str]:
    """Return the revisions that receive requests: those with workers of both roles.

    If there is none, the decode workers of one revision compute prompts too, or prefill workers serve alone
    what needs no decode worker.

    Args:
        prefill: revisions of the prefill workers that can serve.
        decode: revisions of the decode workers that can serve, the first joined first.
    """
    complete = [each for each in dict.fromkeys(decode) if each in prefill]
    return complete or [*decode[:1]] or [*dict.fromkeys(prefill)][:1]
