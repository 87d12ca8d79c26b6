"""Panels that more than one board has."""

from __future__ import annotations

from collections.abc import Sequence

from quire.observability.panels import Panel, Target, chart, line
from quire.observability.promql import INTERVAL, mean, quantile, rate, selector, total

STEP = "quire_step_phase_seconds"
TTFT = "quire_time_to_first_token_seconds"
PHASE = "quire_request_phase_seconds"


def busy_panel() -> Panel:
    """Return the panel that shows whether the ratio of prefill to decode workers is right."""
    busy = rate(f"{STEP}_sum", by="job")
    return line(
        "Busy: prefill against decode",
        "Seconds of steps / seconds, a mean over a pool's workers. If one pool is busy and the other"
        " idle, the ratio of workers is wrong.",
        f"{busy} / count by (job) (quire_engine_up) >= 0",
        "{{job}}",
        "percentunit",
    )


def step_panels(ours: str) -> Sequence[Panel]:
    return [
        chart(
            "Mean step by phase",
            "Time of a step: schedule, prepare, forward, sample, process.",
            [Target(mean(STEP, ours, "phase"), "{{phase}}")],
            "s",
            is_stacked=True,
        ),
        line(
            "Forward pass, p95",
            "95th percentile of the forward pass of a step.",
            quantile(0.95, STEP, f'phase="forward",{ours}', "instance"),
            "{{instance}}",
            "s",
        ),
        line(
            "Tokens in a step",
            "Mean tokens that a step computes; the budget is --max-num-batched-tokens.",
            mean("quire_step_tokens", ours, "instance"),
            "{{instance}}",
        ),
    ]


def block_panels(ours: str) -> Sequence[Panel]:
    return [
        line(
            "Blocks by state",
            "Free: empty. Cached: reusable and not in use. Used: in use by at least one sequence or pin.",
            total("quire_kv_cache_blocks", ours, "state"),
            "{{state}}",
            is_stacked=True,
        ),
        line(
            "Blocks in use",
            "Used blocks / all blocks.",
            f"max by (instance) ({selector('quire_kv_cache_usage_ratio', ours)})",
            "{{instance}}",
            "percentunit",
        ),
    ]


def tier_panels(ours: str) -> Sequence[Panel]:
    return [
        line(
            "Blocks below the pool",
            "Cached blocks in host memory and on disk: --host-cache, --disk-cache.",
            total("quire_cache_tier_blocks", ours, "tier"),
            "{{tier}}",
            is_stacked=True,
        ),
        line(
            "Blocks found, by tier",
            "Blocks that prompts did not have to compute, by the tier that had them.",
            rate("quire_cache_tier_hits_total", ours, "tier"),
            "{{tier}}",
            "ops",
            is_stacked=True,
        ),
        chart(
            "Blocks moved between tiers",
            "Evicted blocks by the tier to which they moved, gone if there was none; blocks moved up by"
            " the tier that had them.",
            [
                Target(rate("quire_cache_tier_demotions_total", ours, "tier"), "to {{tier}}"),
                Target(rate("quire_cache_tier_promotions_total", ours, "tier"), "from {{tier}}"),
            ],
            "ops",
        ),
        line(
            "Disk errors",
            "Files of the disk cache that could not be used; their blocks are computed again.",
            rate("quire_cache_tier_disk_errors_total", ours, "reason"),
            "{{reason}}",
            "ops",
        ),
    ]


def process_panels(ours: str) -> Sequence[Panel]:
    return [
        line(
            "Event loop lag, p99",
            "How late the event loop runs a timer.",
            quantile(0.99, "quire_event_loop_lag_seconds", ours, "instance"),
            "{{instance}}",
            "s",
        ),
        line(
            "CPU",
            "Processors in use.",
            f"sum by (instance) (rate({selector('process_cpu_seconds_total', ours)}[{INTERVAL}]))",
            "{{instance}}",
        ),
        line(
            "Memory",
            "Resident memory.",
            total("process_resident_memory_bytes", ours, "instance"),
            "{{instance}}",
            "bytes",
        ),
    ]
