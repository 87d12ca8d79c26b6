"""What an operator does about services that do not have the same cluster secret."""

from __future__ import annotations

REMEDY = "give all routers and workers the same QUIRE_CLUSTER_SECRET (--cluster-secret)"
