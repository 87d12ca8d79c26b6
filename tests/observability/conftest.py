"""The alert rules, and what the code reports."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.observability.metric_docs import series
from quire.observability.registries import described, router_registry, worker_registry

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def alert_rules() -> list[dict[str, Any]]:
    """Return the rules of alerts.yml."""
    groups = yaml.safe_load((ROOT / "observability" / "alerts.yml").read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.fixture(scope="session")
def known_series() -> dict[str, set[str]]:
    """Return the labels of every series by its name, those that Prometheus adds included."""
    known: defaultdict[str, set[str]] = defaultdict(lambda: {"job", "instance"})
    for registry in (router_registry(), worker_registry()):
        for name, labels in series(described(registry)):
            known[name] |= labels
    return {**known, "up": {"job", "instance"}}
