"""A charge for tests in which no tenant pays."""

from __future__ import annotations

from quire.services.router.execution.token_charge import AttemptCharge, RequestCharge


def free_charge() -> AttemptCharge:
    """Return a charge that no tenant pays."""
    return AttemptCharge(RequestCharge(lambda num_tokens: None, 0))
