"""Metrics of a worker's engine and of the prompts that it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_cache.block_pool import BlockCounts
from quire.engine.kv_cache.tiers import CacheTiers
from quire.engine.runner.step_clock import PHASES
from quire.engine.scheduling.preemption import PreemptionCounts
from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.engine.speculation.speculator import SpeculationCounts
from quire.kvindex.worker_record import ROLES
from quire.services.server.phases import HAND_OVER, PROMPT_PHASES, PhaseMetrics

HIT_SOURCES = ("own", "tier", "peer")
SNAPSHOT_SECONDS = 3.0
"""Seconds for which a scrape waits for the engine, which answers between two steps.

Prometheus gives up after its interval of five seconds, and would never learn that the engine is stuck.
"""

_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


_TIER_COUNTERS = {
    "hits": (
        "Blocks that prompts did not have to compute, by the tier that had them.",
        "tier",
        ("pool", "host", "disk"),
    ),
    "demotions": ("Evicted blocks, by the tier to which they moved.", "tier", ("host", "disk", "gone")),
    "promotions": ("Blocks moved up, by the tier that had them.", "tier", ("host", "disk")),
    "disk_errors": (
        "Files that could not be used.",
        "reason",
        ("read", "write", "truncated", "corrupt", "stalled"),
    ),
}
"""Text, label and values of each count of ``CacheTiers``."""
_TIER_BLOCKS = {"blocks": ("Cached blocks below the pool.", "tier", ("host", "disk"))}
_GAUGES = {
    "quire_requests_running": ("num_running", "Sequences in the running batch."),
    "quire_requests_waiting": (
        "num_waiting",
        "Requests that wait for blocks or budget, including preempted ones.",
    ),
    "quire_requests_transferring": ("num_transferring", "Requests whose blocks another worker sends."),
    "quire_requests_waiting_for_blocks": (
        "num_waiting_for_blocks",
        "Requests whose promised blocks are not free yet: their senders wait for credit.",
    ),
    "quire_prefill_backlog_tokens": ("backlog_tokens", "Prompt tokens that later steps must compute."),
    "quire_kv_pinned_blocks": (
        "num_pinned_blocks",
        "Blocks held for other workers: finished prefills that are not released yet, and leases.",
    ),
    "quire_kv_oldest_pin_seconds": ("oldest_pin_seconds", "Age of the oldest pinned blocks."),
}
"""Field of ``EngineSnapshot`` and text of each gauge."""


class StepMetrics:
    """Time and size of the engine's steps; updated in its thread after each one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            "quire_step_phase_seconds",
            "Time of a step by phase.",
            ["phase"],
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._observe = [(phase, seconds.labels(phase).observe) for phase in PHASES]
        self._tokens = Histogram(
            "quire_step_tokens", "Tokens that a step computes.", buckets=_STEP_TOKENS, registry=registry
        )
        self._sequences = Counter(
            "quire_step_sequences_total", "Sequences computed, summed over steps.", registry=registry
        )

    def stepped(self, engine: Engine, num_sequences: int) -> None:
        """Record one step."""
        self._sequences.inc(num_sequences)
        self._tokens.observe(engine.num_step_tokens)
        for phase, observe in self._observe:
            observe(engine.step_clock.seconds[phase])


def describe_cache(
    registry: CollectorRegistry, *, block_size: int, num_blocks: int, block_bytes: int
) -> None:
    """Publish the size of the block pool, which does not change."""
    sizes = {"block_size": block_size, "num_blocks": num_blocks, "block_bytes": block_bytes}
    info = Info("quire_cache_config", "The block pool; the value is 1.", registry=registry)
    info.info({name: str(size) for name, size in sizes.items()})


def describe_role(registry: CollectorRegistry, present: Callable[[], str]) -> None:
    """Publish the worker's present role."""
    gauge = Gauge(
        "quire_worker_role", "1 for the present role, 0 for the other.", ["role"], registry=registry
    )
    for role in ROLES:
        gauge.labels(role).set_function(partial(lambda role: float(role == present()), role))


class PromptMetrics:
    """Metrics of the prompts that were computed here, and of their cached prefixes by place."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.phases = PhaseMetrics(registry, (*PROMPT_PHASES, *HAND_OVER))
        self._queries = Counter(
            "quire_prefix_cache_queries_total",
            "Prompt tokens looked up in the prefix cache, by the worker that computes the rest.",
            registry=registry,
        )
        hits = Counter(
            "quire_prefix_cache_hits_total",
            "Of these, tokens with cached KV, in the worker's own pool, a lower tier, or a peer.",
            ["source"],
            registry=registry,
        )
        self._hits = {source: hits.labels(source) for source in HIT_SOURCES}

    def record_prompt(self, sequence: Sequence, num_pulled_tokens: int) -> None:
        """Count a prompt when all of its tokens that were not cached have been computed."""
        self._queries.inc(sequence.num_prompt_tokens)
        # A later attempt's cached tokens include tokens that earlier attempts generated.
        num_cached = min(sequence.num_cached_tokens, sequence.num_prompt_tokens)
        num_tier = min(sequence.num_promoted_tokens, num_cached)
        num_peer = min(num_pulled_tokens, num_cached - num_tier)
        self._hits["own"].inc(num_cached - num_tier - num_peer)
        self._hits["tier"].inc(num_tier)
        self._hits["peer"].inc(num_peer)


class TierSnapshot(NamedTuple):
    """The tiers of the prefix cache between two steps: blocks by tier, and each count by its label."""

    blocks: Mapping[str, int]
    hits: Mapping[str, int]
    demotions: Mapping[str, int]
    promotions: Mapping[str, int]
    disk_errors: Mapping[str, int]


class EngineSnapshot(NamedTuple):
    """An engine's queues and blocks between two steps."""

    num_running: int
    num_waiting: int
    num_transferring: int
    num_waiting_for_blocks: int
    backlog_tokens: int
    blocks: BlockCounts
    num_pinned_blocks: int
    oldest_pin_seconds: float
    preemptions: PreemptionCounts
    drafts: SpeculationCounts
    tiers: TierSnapshot | None = None
    """None: the cache has no tier below the pool."""


def take_snapshot(engine: Engine) -> EngineSnapshot:
    """Read an engine; runs in its thread."""
    queues = engine.queues
    statuses = [s.status for group in engine.groups.values() for s in group.sequences]
    return EngineSnapshot(
        num_running=sum(len(group.sequences) for group in queues.running),
        num_waiting=len(queues.waiting),
        num_transferring=statuses.count(SequenceStatus.TRANSFERRING),
        num_waiting_for_blocks=engine.transfers.num_waiting,
        backlog_tokens=sum(g.num_uncomputed_tokens for g in (*queues.running, *queues.waiting)),
        blocks=engine.pool.counts,
        num_pinned_blocks=engine.num_pinned_blocks,
        oldest_pin_seconds=engine.oldest_pin_seconds,
        preemptions=engine.preemption.counts,
        drafts=engine.speculator.counts if engine.speculator is not None else SpeculationCounts(0, 0),
        tiers=_take_tier_snapshot(engine.tiers) if engine.tiers is not None else None,
    )


def _take_tier_snapshot(tiers: CacheTiers) -> TierSnapshot:
    blocks = {"host": len(tiers.host), "disk": len(tiers.disk) if tiers.disk is not None else 0}
    return TierSnapshot(blocks, **{name: dict(getattr(tiers.counts, name)) for name in _TIER_COUNTERS})


def ask_for_snapshot(
    engine: EngineThread, timeout_seconds: float = SNAPSHOT_SECONDS
) -> EngineSnapshot | None:
    """Read an engine from any thread; return None if it has stopped, or does not end its step in time."""
    try:
        return engine.post(take_snapshot).result(timeout_seconds)
    except (EngineStoppedError, TimeoutError):
        return None


class EngineCollector(Collector):
    """Reads the engine at each scrape. Steps cost nothing more, and an idle engine's values are correct.

    Args:
        snapshot: returns the engine's state now; None if the engine does not answer.
    """

    def __init__(self, snapshot: Callable[[], EngineSnapshot | None]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        """Return the metrics without values."""
        return list(_families(None))

    def collect(self) -> list[Metric]:
        """Return the present values; if the engine has stopped or is stuck, only a metric that says so."""
        return list(_families(self._snapshot()))


def _families(now: EngineSnapshot | None) -> Iterator[Metric]:
    def gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text)
        if value is not None:
            family.add_metric([], value)
        return family

    yield gauge("quire_engine_up", "1 if the engine answers between its steps.", float(now is not None))
    for name, (field, text) in _GAUGES.items():
        yield gauge(name, text, now and getattr(now, field))
    yield gauge(
        "quire_kv_cache_usage_ratio", "Share of blocks in use.", now and now.blocks.used / sum(now.blocks)
    )
    blocks = GaugeMetricFamily("quire_kv_cache_blocks", "KV blocks by state.", labels=["state"])
    preemptions = CounterMetricFamily(
        "quire_preemptions", "Preempted requests, by how they get their blocks back.", labels=["kind"]
    )
    drafts = CounterMetricFamily(
        "quire_speculation_tokens", "Draft tokens, and those that were accepted.", labels=["kind"]
    )
    for family, field in ((blocks, "blocks"), (preemptions, "preemptions"), (drafts, "drafts")):
        for kind, count in getattr(now, field)._asdict().items() if now else ():
            family.add_metric([kind], count)
        yield family
    if now is None or now.tiers is not None:
        yield from _tier_families(now and now.tiers)


def _tier_families(now: TierSnapshot | None) -> Iterator[Metric]:
    for kind, texts in ((GaugeMetricFamily, _TIER_BLOCKS), (CounterMetricFamily, _TIER_COUNTERS)):
        for name, (text, label, values) in texts.items():
            family = kind(f"quire_cache_tier_{name}", text, labels=[label])
            for value in values if now else ():
                family.add_metric([value], getattr(now, name).get(value, 0))
            yield family
