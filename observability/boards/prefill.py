"""The prefill workers."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.boards.shared import (
    PHASE,
    block_panels,
    busy_panel,
    process_panels,
    step_panels,
    tier_panels,
)
from quire.observability.dashboard import build_board
from quire.observability.panels import Panel, Target, chart, line, side_by_side
from quire.observability.promql import quantile, rate, selector, share_of_all, total

OURS = 'job="prefill",instance=~"$instance"'
QUERIES, HITS = "quire_prefix_cache_queries_total", "quire_prefix_cache_hits_total"


def prefill_board() -> Dashboard:
    """Return the board of the prefill workers."""
    return build_board(
        uid="quire-prefill",
        title="quire / Prefill pool",
        description="Queues, steps, prefix cache and blocks of the prefill workers.",
        instances_of='quire_engine_up{job="prefill"}',
        rows={
            "Load": _load_panels(),
            "Steps": step_panels(OURS),
            "Prefix cache": _cache_panels(),
            "Tiers below the pool": side_by_side(4, tier_panels(OURS)),
            "Process": process_panels(OURS),
        },
    )


def _load_panels() -> Sequence[Panel]:
    """Return the panels of requests: how many there are, and how long they wait and run."""
    return [
        chart(
            "Requests",
            "Sequences in the running batch, and requests that wait for blocks or budget.",
            [
                Target(total("quire_requests_running", OURS, "instance"), "running {{instance}}"),
                Target(total("quire_requests_waiting", OURS, "instance"), "waiting {{instance}}"),
            ],
        ),
        line(
            "Backlog",
            "Prompt tokens that later steps must compute.",
            total("quire_prefill_backlog_tokens", OURS, "instance"),
            "{{instance}}",
        ),
        busy_panel(),
        line(
            "Time in the queue, p95",
            "From the scheduler's queue to the first step of a prompt.",
            quantile(0.95, PHASE, f'phase="prefill_queue",{OURS}', "instance"),
            "{{instance}}",
            "s",
        ),
        line(
            "Time of the computation, p95",
            "From a prompt's first step to its first token.",
            quantile(0.95, PHASE, f'phase="prefill_compute",{OURS}', "instance"),
            "{{instance}}",
            "s",
        ),
        line(
            "Tokens computed",
            "Tokens of all steps.",
            rate("quire_step_tokens_sum", OURS, "instance"),
            "{{instance}}",
        ),
    ]


def _cache_panels() -> Sequence[Panel]:
    """Return the panels of the prefix cache and of the blocks."""
    return [
        line(
            "Hit share by source",
            "Prompt tokens whose KV was not computed / prompt tokens, by the source of the blocks.",
            share_of_all(rate(HITS, OURS, "source"), rate(QUERIES, OURS)),
            "{{source}}",
            "percentunit",
            is_stacked=True,
        ),
        *block_panels(OURS),
        line(
            "Pinned blocks",
            "Blocks of finished prefills that are not yet released, and leased ones.",
            total("quire_kv_pinned_blocks", OURS, "instance"),
            "{{instance}}",
        ),
        line(
            "Oldest pin",
            "Age of the oldest pinned blocks. It grows while a decode worker gives no credit.",
            f"max by (instance) ({selector('quire_kv_oldest_pin_seconds', OURS)})",
            "{{instance}}",
            "s",
        ),
    ]
