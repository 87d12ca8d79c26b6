"""The router and the index, from the reading and the writing side."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.boards.shared import (
    process_panels,
)
from quire.observability.dashboard import build_board
from quire.observability.panels import Panel, Target, chart, latency, line, side_by_side
from quire.observability.promql import mean, rate, total

LOOKUP = "quire_index_lookup_seconds"
OURS = 'job="router"'


def router_board() -> Dashboard:
    """Return the board of the router and the index."""
    return build_board(
        uid="quire-router",
        title="quire / Index and router",
        description="Choices, the prefix index as seen from both of its sides, and the processes.",
        rows={
            "Router": [*_choice_panels(), *_outcome_panels()],
            "Index, look-ups": _lookup_panels(),
            "Index, publishing": _publishing_panels(),
            "Process": process_panels(OURS),
        },
    )


def _choice_panels() -> Sequence[Panel]:
    """Return the panels of live workers, of how they are chosen, and of lost attempts."""
    return [
        line(
            "Live workers",
            "Workers that take requests.",
            total("quire_workers", by="role"),
            "{{role}}",
        ),
        line(
            "Changes of roles",
            "Workers that got this role, by cause: an operator, or the pressure that the router saw.",
            rate("quire_role_changes_total", by="role, cause"),
            "{{role}}: {{cause}}",
            "ops",
        ),
        line(
            "Pressure, for elastic roles",
            "Expected times as shares of their targets, and the share of decode blocks that is taken."
            " Above 1, requests miss their targets.",
            "max by (kind) (quire_role_pressure_ratio)",
            "{{kind}}",
        ),
        line(
            "Requests that wait for a worker",
            "Requests that wait for a decode worker. They continue in their order when there is one.",
            total("quire_router_requests_waiting"),
            "waiting",
        ),
        line(
            "Choices of a prefill worker",
            "By reason; none: the decode worker computes the prompt.",
            rate("quire_router_decision_total", 'role="prefill"', "reason"),
            "{{reason}}",
            "ops",
            is_stacked=True,
        ),
        line(
            "Choices of a decode worker",
            "By reason: the only one, the prefix it holds, least load, or a tie.",
            rate("quire_router_decision_total", 'role="decode"', "reason"),
            "{{reason}}",
            "ops",
            is_stacked=True,
        ),
        chart(
            "Cached tokens, promised and found",
            "Prompt tokens that the index said the chosen worker holds, and those that it did not"
            " compute. Found above promised is the worker's own knowledge; below, evictions.",
            [
                Target(rate("quire_prompt_tokens_predicted_total"), "promised"),
                Target(rate("quire_prompt_tokens_cached_total"), "found"),
            ],
        ),
        line(
            "Retries",
            "Attempts lost on a worker, by its role and the status it failed with.",
            rate("quire_retries_total", by="role, cause"),
            "{{role}}: {{cause}}",
            "ops",
        ),
    ]


def _outcome_panels() -> Sequence[Panel]:
    """Return the panels that show how calls, HTTP requests and moves ended."""
    return [
        line(
            "Calls by status",
            "gRPC calls that all servers finished.",
            rate("grpc_server_handled_total", by="grpc_code"),
            "{{grpc_code}}",
            "ops",
            is_stacked=True,
        ),
        line(
            "HTTP requests by status",
            "Answers of the OpenAI-compatible API; 499: the client left before its answer.",
            rate("quire_http_requests_total", by="status"),
            "{{status}}",
            "reqps",
            is_stacked=True,
        ),
        line(
            "HTTP requests by route",
            "Requests to the OpenAI-compatible API by path.",
            rate("quire_http_requests_total", by="route"),
            "{{route}}",
            "reqps",
            is_stacked=True,
        ),
        line(
            "Moves",
            "Answers on draining workers that moved, or stayed because blocks were not copied.",
            rate("quire_moves_total", by="result"),
            "{{result}}",
            "ops",
        ),
        line(
            "Copies of running answers",
            "Copies of running answers to another worker, by how they ended.",
            rate("quire_answer_copies_total", by="result"),
            "{{result}}",
            "ops",
        ),
    ]


def _lookup_panels() -> Sequence[Panel]:
    """Return the panels that show how fast look-ups are, and what they find."""
    return [
        latency("Look-up", LOOKUP, "Time of a look-up, those given up included."),
        line(
            "Look-ups by result",
            "A worker has the first block, no worker has it, or the look-up failed.",
            rate(f"{LOOKUP}_count", by="result"),
            "{{result}}",
            "ops",
            is_stacked=True,
        ),
        line(
            "Match",
            "Mean share of a prompt's blocks that the worker with most of them has.",
            mean("quire_index_match_ratio"),
            "match",
            "percentunit",
        ),
        line(
            "Routed without the index",
            "By reason: it was late, it failed, or the breaker was open.",
            rate("quire_index_fallback_total", by="reason"),
            "{{reason}}",
            "ops",
        ),
        line(
            "Breaker",
            "0 closed, 1 half open, 2 open.",
            "max(quire_index_breaker_state)",
            "breaker",
        ),
        line(
            "Blocks asked for",
            "Mean blocks of a look-up.",
            mean("quire_index_lookup_blocks"),
            "blocks",
        ),
    ]


def _publishing_panels() -> Sequence[Panel]:
    """Return the panels that show how closely the index follows the caches of the workers."""
    return side_by_side(
        4,
        [
            line(
                "Entries",
                "Published, evicted, or removed by a sweep after a worker's end.",
                rate("quire_index_publish_entries_total", by="op"),
                "{{op}}",
                "ops",
            ),
            chart(
                "Behind",
                "Changes of a worker's cache that are not in the index yet.",
                [
                    Target("max by (job) (quire_index_publish_queue)", "changes, {{job}}"),
                ],
            ),
            line(
                "Lag",
                "Age of the oldest change that is not in the index yet.",
                "max by (job) (quire_index_publish_lag_seconds)",
                "{{job}}",
                "s",
            ),
            chart(
                "Leases lost, index full",
                "Lost leases, and publishes for which Redis had no memory.",
                [
                    Target(rate("quire_index_fenced_total"), "lease lost"),
                    Target(rate("quire_index_full_total"), "index full"),
                ],
                "ops",
            ),
        ],
    )
