"""The decode workers."""

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
from quire.observability.promql import quantile, quotient, rate, total

OURS = 'job="decode",instance=~"$instance"'
DRAFTS = "quire_speculation_tokens_total"


def decode_board() -> Dashboard:
    """Return the board of the decode workers."""
    return build_board(
        uid="quire-decode",
        title="quire / Decode pool",
        description="Batches, blocks and preemptions of the decode workers.",
        instances_of='quire_engine_up{job="decode"}',
        rows={
            "Load": _load_panels(),
            "Steps": step_panels(OURS),
            "Speculation": _speculation_panels(),
            "Blocks": _block_panels(),
            "Tiers below the pool": side_by_side(4, tier_panels(OURS)),
            "Process": process_panels(OURS),
        },
    )


def _load_panels() -> Sequence[Panel]:
    """Return the panels of requests: how many there are, and how long they wait."""
    return [
        chart(
            "Requests",
            "Sequences in the running batch; requests that wait to be admitted; requests whose"
            " blocks are being sent, and those of them for which there is no room yet.",
            [
                Target(total("quire_requests_running", OURS), "running"),
                Target(total("quire_requests_waiting", OURS), "waiting"),
                Target(total("quire_requests_transferring", OURS), "transferring"),
                Target(total("quire_requests_waiting_for_blocks", OURS), "waiting for blocks"),
            ],
        ),
        line(
            "Tokens",
            "Sequences computed by all steps. Each of them gives a token.",
            rate("quire_step_sequences_total", OURS, "instance"),
            "{{instance}}",
        ),
        busy_panel(),
        line(
            "Admission, p95",
            "From the push's commit to the first step of a sequence.",
            quantile(0.95, PHASE, f'phase="decode_queue",{OURS}', "instance"),
            "{{instance}}",
            "s",
        ),
        line(
            "First step, p95",
            "From a sequence's admission to its first token from this worker.",
            quantile(0.95, PHASE, f'phase="first_decode_step",{OURS}', "instance"),
            "{{instance}}",
            "s",
        ),
        line(
            "Preemptions",
            "Requests that lost their blocks, by how they get them back.",
            rate("quire_preemptions_total", OURS, "kind"),
            "{{kind}}",
            "ops",
        ),
    ]


def _speculation_panels() -> Sequence[Panel]:
    """Return the panels of draft tokens and of how many of them were right."""
    return side_by_side(
        2,
        [
            line(
                "Draft tokens",
                "Draft tokens, and right draft tokens.",
                rate(DRAFTS, OURS, "kind"),
                "{{kind}}",
            ),
            line(
                "Right draft tokens",
                "Right draft tokens / draft tokens of a worker; empty without --speculation.",
                quotient(
                    rate(DRAFTS, f'kind="accepted",{OURS}', "instance"),
                    rate(DRAFTS, f'kind="drafted",{OURS}', "instance"),
                ),
                "{{instance}}",
                "percentunit",
            ),
        ],
    )


def _block_panels() -> Sequence[Panel]:
    """Return the panels of blocks, and of prompts that decode workers computed themselves."""
    return [
        *block_panels(OURS),
        line(
            "Prompts computed here",
            "Prompt tokens that decode workers computed themselves.",
            rate("quire_prefix_cache_queries_total", OURS, "instance"),
            "{{instance}}",
        ),
    ]
