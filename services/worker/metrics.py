"""What a worker reports of its engine."""

from __future__ import annotations

from collections import Counter as PlainCounter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.engine.cache_tiers import CacheTiers
from quire.engine.engine import Engine
from quire.engine.scheduler import PreemptionCounts
from quire.engine.speculation import SpeculationCounts

_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class WorkerMetrics:
    """Gauges and counters of one worker; updated in the engine's thread after each step."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._running = Gauge("quire_requests_running", "Sequences in the running batch.", registry=registry)
        self._waiting = Gauge("quire_requests_waiting", "Sequences waiting for blocks.", registry=registry)
        self._blocks = Gauge("quire_kv_cache_blocks", "KV blocks by state.", ["state"], registry=registry)
        self._pinned = Gauge(
            "quire_kv_pinned_blocks", "Blocks of finished prefills not yet released.", registry=registry
        )
        self._usage = Gauge("quire_kv_cache_usage_ratio", "Share of blocks in use.", registry=registry)
        self._preemptions = Counter(
            "quire_preemptions_total",
            "Preempted requests, by how they come back.",
            ["kind"],
            registry=registry,
        )
        self._counted = PreemptionCounts(0, 0)
        self._guesses = Counter(
            "quire_speculation_tokens_total",
            "Guessed tokens, and those of them that were right.",
            ["kind"],
            registry=registry,
        )
        self._counted_guesses = SpeculationCounts(0, 0)
        self._tiers = TierMetrics(registry)
        self._steps = Histogram(
            "quire_step_phase_seconds",
            "Time of a step by phase.",
            ["phase"],
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._sequences = Counter(
            "quire_step_sequences_total", "Sequences computed, summed over steps.", registry=registry
        )

    def stepped(self, engine: Engine, num_sequences: int) -> None:
        """Record one step."""
        self._sequences.inc(num_sequences)
        seconds = engine.step_seconds
        for phase in ("propose", "schedule", "prepare", "forward", "sample", "process"):
            self._steps.labels(phase).observe(getattr(seconds, phase))
        self.refresh(engine)

    def refresh(self, engine: Engine) -> None:
        """Read the engine's queues and its pool."""
        counts = engine.pool.counts
        self._running.set(len(engine.scheduler.running))
        self._waiting.set(len(engine.scheduler.waiting))
        for state, count in counts._asdict().items():
            self._blocks.labels(state).set(count)
        self._pinned.set(engine.num_pinned_blocks)
        self._usage.set(counts.used / engine.pool.num_blocks)
        preemptions = engine.scheduler.preemptions
        for kind, now, before in zip(preemptions._fields, preemptions, self._counted, strict=True):
            self._preemptions.labels(kind).inc(now - before)
        self._counted = preemptions
        if engine.speculator is not None:
            guesses = engine.speculator.counts
            for kind, now, before in zip(guesses._fields, guesses, self._counted_guesses, strict=True):
                self._guesses.labels(kind).inc(now - before)
            self._counted_guesses = guesses
        if engine.tiers is not None:
            self._tiers.refresh(engine.tiers)


class TierMetrics:
    """Of the prefix cache in host memory and on disk."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(f"quire_cache_tier_{name}_total", text, [label], registry=registry)

        self._blocks = Gauge(
            "quire_cache_tier_blocks", "Cached blocks below the pool.", ["tier"], registry=registry
        )
        self._counters = {
            "hits": counter(
                "hits", "Blocks that prompts did not have to compute, by where they were.", "tier"
            ),
            "demotions": counter("demotions", "Blocks evicted, by the tier that took them.", "tier"),
            "promotions": counter("promotions", "Blocks brought back, by the tier they came from.", "tier"),
            "disk_errors": counter("disk_errors", "Files that could not be used.", "reason"),
        }
        self._counted = {name: PlainCounter[str]() for name in self._counters}

    def refresh(self, tiers: CacheTiers) -> None:
        """Read the tiers' counts."""
        self._blocks.labels("host").set(len(tiers.host))
        self._blocks.labels("disk").set(len(tiers.disk) if tiers.disk is not None else 0)
        for name, counter in self._counters.items():
            now: PlainCounter[str] = getattr(tiers.counts, name)
            for label, count in (now - self._counted[name]).items():
                counter.labels(label).inc(count)
            self._counted[name] = now.copy()
