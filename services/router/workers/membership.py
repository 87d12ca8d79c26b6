"""Defines where a router learns which workers there are: a fixed list, or Redis (``sources.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Member(NamedTuple):
    """A worker's entry in the membership."""

    address: str
    epoch: str | None = None
    """Together with a live lease, the epoch proves that the worker is the one that joined; None: ask it."""
    is_draining: bool = False
    fingerprint: str | None = None
    role: str | None = None
    """Present role; None: ask the worker."""


class MembershipLost(Exception):
    """The membership cannot be read now; this says nothing about the workers themselves."""


class Membership(Protocol):
    """Source of the workers' addresses, such as Redis or a fixed list."""

    async def members(self) -> Sequence[Member]:
        """Return the members.

        Raises:
            MembershipLost: the source does not answer.
        """


class StaticMembership:
    """A fixed list of worker addresses; the router asks each worker for its health."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._members = [Member(address) for address in addresses]

    async def members(self) -> Sequence[Member]:
        """Return a member for every configured address."""
        return self._members
