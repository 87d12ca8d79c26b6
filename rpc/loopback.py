"""Recognises loopback hosts, which other machines cannot reach, and explains what other hosts require."""

from __future__ import annotations

import ipaddress

REMEDY = "give all routers and workers the same QUIRE_CLUSTER_SECRET (--cluster-secret)"
"""What an operator does about services that do not have the same cluster secret."""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is ``localhost`` or a loopback address; other names count as not loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
