"""Defines a tenant of the router, with the limits that its key file declares."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client whose requests share KV blocks with each other, and never with those of other tenants.

    Attributes:
        name: name of the tenant; empty for the single tenant of a router without API keys.
        tokens_per_minute: limit on prompt and answer tokens; one minute's worth may come at once. None: no
            limit.
        max_requests: limit on requests that run at the same time; a request counts once for each of its
            answers. None: no limit.
        max_waiting: limit on requests that wait, in order of arrival, for a running one to end.
    """

    name: str = ""
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_waiting: int = 0

    def limits(self) -> str:
        """Return the limits in the syntax of a key file, ``name=value`` pairs; empty without limits."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return " ".join(f"{name.replace('_', '-')}={value}" for name, value in options.items() if value)
