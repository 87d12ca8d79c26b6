"""The decode workers."""

from __future__ import annotations

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
from quire.observability.panels import Target, chart, line, side_by_side
from quire.observability.promql import quantile, quotient, rate, total


def decode_board() -> Dashboard:
    """Return the board of the decode workers."""
    ours, drafts = 'job="decode",instance=~"$instance"', "quire_speculation_tokens_total"
    return build_board(
        uid="quire-decode",
        title="quire / Decode pool",
        description="Batches, blocks and preemptions of the decode workers.",
        instances_of='quire_engine_up{job="decode"}',
        rows={
            "Load": [
                chart(
                    "Requests",
                    "Sequences in the running batch; requests that wait to be admitted; requests whose"
                    " blocks are on the way, and those of them that have no room yet.",
                    [
                        Target(total("quire_requests_running", ours), "running"),
                        Target(total("quire_requests_waiting", ours), "waiting"),
                        Target(total("quire_requests_transferring", ours), "transferring"),
                        Target(total("quire_requests_waiting_for_blocks", ours), "waiting for blocks"),
                    ],
                ),
                line(
                    "Tokens",
                    "Sequences computed by all steps, each of which gives a token.",
                    rate("quire_step_sequences_total", ours, "instance"),
                    "{{instance}}",
                ),
                busy_panel(),
                line(
                    "Admission, p95",
                    "From the push's commit to the first step of a sequence.",
                    quantile(0.95, PHASE, f'phase="decode_queue",{ours}', "instance"),
                    "{{instance}}",
                    "s",
                ),
                line(
                    "First step, p95",
                    "From a sequence's admission to this worker's first token of it.",
                    quantile(0.95, PHASE, f'phase="first_decode_step",{ours}', "instance"),
                    "{{instance}}",
                    "s",
                ),
                line(
                    "Preemptions",
                    "Requests that gave up their blocks, by how they come back.",
                    rate("quire_preemptions_total", ours, "kind"),
                    "{{kind}}",
                    "ops",
                ),
            ],
            "Steps": step_panels(ours),
            "Speculation": side_by_side(
                2,
                [
                    line(
                        "Draft tokens",
                        "Tokens that speculation drafted, and those of them that were right.",
                        rate(drafts, ours, "kind"),
                        "{{kind}}",
                    ),
                    line(
                        "Right draft tokens",
                        "Right draft tokens / draft tokens, over a worker; nothing without --speculation.",
                        quotient(
                            rate(drafts, f'kind="accepted",{ours}', "instance"),
                            rate(drafts, f'kind="drafted",{ours}', "instance"),
                        ),
                        "{{instance}}",
                        "percentunit",
                    ),
                ],
            ),
            "Blocks": [
                *block_panels(ours),
                line(
                    "Prompts computed here",
                    "Prompt tokens that decode workers computed themselves.",
                    rate("quire_prefix_cache_queries_total", ours, "instance"),
                    "{{instance}}",
                ),
            ],
            "Tiers below the pool": side_by_side(4, tier_panels(ours)),
            "Process": process_panels(ours),
        },
    )
