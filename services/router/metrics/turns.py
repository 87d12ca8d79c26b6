"""Measures what share of a session's last sequence its next prompt repeats, and what share was cached."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Histogram

MAX_SESSIONS = 16_384
"""Maximum number of sessions that are remembered; the names and entries of so many take about 6 MB."""
MAX_BYTES = 64 << 20
"""Maximum size of the remembered sequences, 4 bytes a token: those of 1,000 sessions of 16,000 tokens."""
RATIO_BUCKETS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)


class Turns:
    """Remembers the last sequence (prompt and answer) of each session, and forgets the oldest ones first.

    Only the router's memory has the sequences, and only for these metrics.
    """

    def __init__(
        self, registry: CollectorRegistry, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._last: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        """The tokens of the last sequence by tenant and name of the session, oldest first."""
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
        self, tenant: str, session: str, prompt: Sequence[int], answer: Sequence[int], num_cached: int
    ) -> None:
        """Observe a turn that has been answered, and remember its sequence for the next one.

        Args:
            session: its name within the tenant; an empty one is no session.
            answer: the tokens that the next prompt may repeat; none if there are several answers.
            num_cached: prompt tokens whose KV was not computed.
        """
        if not session:
            return
        tokens = array("I", prompt)
        if (last := self._last.pop((tenant, session), None)) is not None:
            self._num_bytes -= len(last)
            self._repeated.observe(_common_bytes(last, tokens.tobytes()) / len(last))
            self._cached.observe(num_cached / len(prompt))
        tokens.extend(answer)
        sequence = self._last[tenant, session] = tokens.tobytes()
        self._num_bytes += len(sequence)
        while len(self._last) > self._max_sessions or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._last.popitem(last=False)[1])


def _common_bytes(last: bytes, prompt: bytes) -> int:
    """Return the length of the tokens, of four bytes each, with which both begin."""
    if prompt.startswith(last):
        return len(last)
    ends = range(4, min(len(last), len(prompt)) + 1, 4)
    return 4 * bisect_left(ends, True, key=lambda end: not prompt.startswith(last[:end]))
