"""A worker's metrics: the engine as it is at a scrape, and where prefixes came from."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from prometheus_client import CollectorRegistry

from quire.engine.engine_thread import EngineStoppedError
from quire.engine.kv_cache.block_pool import BlockCounts
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.preemption import PreemptionCounts
from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.speculator import SpeculationCounts
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import SamplingParams
from quire.services.worker.reports.metrics import (
    EngineCollector,
    EngineSnapshot,
    PromptMetrics,
    ask_for_snapshot,
    take_snapshot,
)
from tests.testing.constant_engine import make_constant_engine

SNAPSHOT = EngineSnapshot(
    3, 2, 1, 1, 40, BlockCounts(10, 20, 30), 7, 1.5, PreemptionCounts(4, 5), SpeculationCounts(9, 6)
)


def test_an_engine_is_reported_as_it_is() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: SNAPSHOT))
    read = registry.get_sample_value
    assert read("quire_engine_up") == 1
    assert (read("quire_requests_running"), read("quire_requests_waiting")) == (3, 2)
    states = [read("quire_kv_cache_blocks", {"state": state}) for state in ("free", "cached", "used")]
    assert states == [10, 20, 30]
    assert read("quire_kv_cache_usage_ratio") == 0.5
    assert (read("quire_kv_pinned_blocks"), read("quire_kv_oldest_pin_seconds")) == (7, 1.5)
    assert read("quire_preemptions_total", {"kind": "swapped"}) == 4
    assert read("quire_preemptions_total", {"kind": "recomputed"}) == 5
    assert read("quire_speculation_tokens_total", {"kind": "accepted"}) == 6
    # Zero would say that there are tiers in which nothing is found.
    assert not [metric.name for metric in registry.collect() if "tier" in metric.name]


def test_tiers_are_reported_as_they_are_without_another_step() -> None:
    host = HostCache(KvMemory(KvShape(1, 1, 4, 1, "float32"), 4, torch.device("cpu")))
    engine = make_constant_engine(4, 64, num_blocks=8, host_cache=host)
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: take_snapshot(engine)))
    read = registry.get_sample_value
    for first_token in (1, 2):
        prompt = [first_token] * 24
        engine.add_request(Sequence(f"r-{first_token}", prompt, 24, SamplingParams(max_tokens=1), b""))
        while not engine.is_idle:
            engine.step()
    assert read("quire_cache_tier_blocks", {"tier": "host"}) == 4
    assert read("quire_cache_tier_demotions_total", {"tier": "host"}) == 4
    assert read("quire_cache_tier_hits_total", {"tier": "disk"}) == 0
    engine.clear_cache()
    assert read("quire_cache_tier_blocks", {"tier": "host"}) == 0


def test_the_scrape_of_an_unresponsive_engine_has_no_other_value() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: None))
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert [(sample.name, sample.value) for sample in samples] == [("quire_engine_up", 0)]


@pytest.mark.parametrize(
    "post", [Mock(return_value=Future()), Mock(side_effect=EngineStoppedError("the engine has stopped"))]
)
def test_a_scrape_has_a_time_limit(post: Mock) -> None:
    """The engine is stuck in a step, or has stopped."""
    thread: Any = SimpleNamespace(post=post)
    assert ask_for_snapshot(thread, timeout_seconds=0.01) is None


@pytest.mark.parametrize(
    ("cached", "promoted", "pulled", "own", "tier", "peer"),
    [
        (0, 0, 0, 0, 0, 0),
        (8, 0, 0, 8, 0, 0),
        (8, 0, 4, 4, 0, 4),
        (4, 0, 8, 0, 0, 4),
        (14, 0, 0, 12, 0, 0),
        (8, 4, 0, 4, 4, 0),
        (10, 4, 4, 2, 4, 4),
        (14, 14, 0, 0, 12, 0),
    ],
)
def test_prefix_hits_are_counted_by_tier(
    cached: int, promoted: int, pulled: int, own: int, tier: int, peer: int
) -> None:
    registry = CollectorRegistry()
    sequence = Sequence("a", [5] * 16, 12, SamplingParams(), b"")
    sequence.num_cached_tokens, sequence.num_promoted_tokens = cached, promoted
    PromptMetrics(registry).record_prompt(sequence, pulled)
    read = registry.get_sample_value
    assert read("quire_prefix_cache_queries_total") == 12
    found = [read("quire_prefix_cache_hits_total", {"source": source}) for source in ("own", "tier", "peer")]
    assert found == [own, tier, peer]
