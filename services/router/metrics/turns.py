"""Measures what share of a session's last sequence its next prompt repeats, and what share was cached."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram

from quire.kvindex.block_hash import CacheScope

MAX_SESSIONS = 16_384
"""Maximum number of sessions that are remembered; the names and entries of so many take about 6 MB."""
MAX_BYTES = 64 << 20
"""Maximum size of the remembered sequences, 4 bytes a token: those of 1,000 sessions of 16,000 tokens."""
RATIO_BUCKETS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)


class LastTurn(NamedTuple):
    """The last turn of a session."""

    scope: CacheScope
    tokens: bytes
    """Prompt and answer, 4 bytes a token."""
    num_first: int
    """Tokens of the session's first prompt, which other sessions may begin with too."""


class Turns:
    """Remembers the last sequence (prompt and answer) of each session, and forgets the oldest ones first.

    Only the router's memory has the sequences, for these metrics and for the end of a session.
    """

    def __init__(
        self, registry: CollectorRegistry, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._last: OrderedDict[tuple[str, str], LastTurn] = OrderedDict()
        """The last turn by tenant and name of the session, oldest first."""
        self._num_bytes = 0
        self._repeated = Histogram(
            "quire_turn_repeat_ratio",
            "Share of a session's last prompt and answer with which its next prompt begins.",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )
        self._cached = Histogram(
            "quire_turn_cached_ratio",
            "Share of a prompt whose KV was not computed, from the second prompt of a session on.",
            buckets=RATIO_BUCKETS,
            registry=registry,
        )

    def record(
        self,
        scope: CacheScope,
        session: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        num_cached: int,
    ) -> None:
        """Observe a turn that has been answered, and remember its sequence for the next one.

        Args:
            scope: the scope of its blocks; sessions belong to the tenant.
            session: its name within the tenant; an empty one is no session.
            answer: the tokens that the next prompt may repeat; none if there are several answers.
            num_cached: prompt tokens whose KV was not computed.
        """
        if not session:
            return
        tokens, num_first = array("I", prompt), len(prompt)
        if (last := self.forget(scope.tenant, session)) is not None:
            num_first = last.num_first
            self._repeated.observe(_common_bytes(last.tokens, tokens.tobytes()) / len(last.tokens))
            self._cached.observe(num_cached / len(prompt))
        tokens.extend(answer)
        turn = self._last[scope.tenant, session] = LastTurn(scope, tokens.tobytes(), num_first)
        self._num_bytes += len(turn.tokens)
        while len(self._last) > self._max_sessions or self._num_bytes > self._max_bytes:
            self.forget(*next(iter(self._last)))

    def forget(self, tenant: str, session: str) -> LastTurn | None:
        """Forget a session and return its last turn; None if it is not remembered."""
        last = self._last.pop((tenant, session), None)
        if last is not None:
            self._num_bytes -= len(last.tokens)
        return last


def _common_bytes(last: bytes, prompt: bytes) -> int:
    """Return the length of the tokens, of four bytes each, with which both begin."""
    if prompt.startswith(last):
        return len(last)
    ends = range(4, min(len(last), len(prompt)) + 1, 4)
    return 4 * bisect_left(ends, True, key=lambda end: not prompt.startswith(last[:end]))
