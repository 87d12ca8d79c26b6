"""Charges the tokens that workers compute for a request to its tenant, each token once.

Generated tokens are charged when the router learns of them, not when the client reads them: with each output
that arrives, with each report of a beam search, and when a call that was ended early reports how many tokens
it had generated. Tokens that quire computes again after a failure or a move are not charged again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class RequestCharge:
    """Charges the tokens of one request, over all its attempts.

    Args:
        spend: charges tokens to the tenant, which may go into debt.
        num_prepaid: number of prompt tokens that were charged before the request began.
    """

    def __init__(self, spend: Callable[[int], None], num_prepaid: int) -> None:
        self._spend = spend
        self._num_prepaid = num_prepaid
        self._num_lost = 0
        """Number of charged tokens that were lost with an attempt, and will be generated again."""

    def add_prompt(self, num_tokens: int) -> None:
        """Charge computed prompt tokens, as far as they exceed those that were charged in advance."""
        excess = max(0, num_tokens - self._num_prepaid)
        self._num_prepaid -= num_tokens - excess
        if excess:
            self._spend(excess)

    def add_generated(self, num_tokens: int) -> None:
        """Charge generated tokens, except for those that replace lost ones."""
        num_again = min(num_tokens, self._num_lost)
        self._num_lost -= num_again
        if num_tokens > num_again:
            self._spend(num_tokens - num_again)

    def add_lost(self, num_tokens: int) -> None:
        """Charge nothing for the next ``num_tokens`` generated tokens."""
        self._num_lost += num_tokens


class AttemptCharge:
    """Charges the tokens that the workers of one attempt have generated.

    Attributes:
        is_repeated: whether another attempt generates the tokens again that were not kept.
    """

    def __init__(self, request: RequestCharge) -> None:
        self._request = request
        self._num_generated: Counter[str] = Counter()
        """Number of generated tokens by worker id."""
        self._num_kept = 0
        self.is_repeated = False

    def add(self, worker_id: str, num_tokens: int) -> None:
        """Charge tokens that have arrived from a worker."""
        if num_tokens and not self.is_repeated:
            self._num_generated[worker_id] += num_tokens
            self._request.add_generated(num_tokens)

    def raise_to(self, worker_id: str, num_tokens: int) -> None:
        """Charge the uncharged part of the total that a worker reports to have generated."""
        self.add(worker_id, max(0, num_tokens - self._num_generated[worker_id]))

    def keep(self, num_tokens: int) -> None:
        """Count tokens that the next attempt will not generate again."""
        self._num_kept += num_tokens

    def repeat(self) -> None:
        """Charge nothing more, and nothing for what the next attempt generates again."""
        self.is_repeated = True
        self._request.add_lost(self._num_generated.total() - self._num_kept)
