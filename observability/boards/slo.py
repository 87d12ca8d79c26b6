"""The first board: the service that users get."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.boards.shared import (
    TTFT,
)
from quire.observability.dashboard import build_board
from quire.observability.panels import Panel, Target, chart, distribution, latency, line, number
from quire.observability.promql import quotient, rate, total

TPOT = "quire_request_time_per_output_token_seconds"
ITL = "quire_inter_token_latency_seconds"
E2E = "quire_e2e_request_latency_seconds"
SLO = "quire_slo_requests_total"
MET = rate(SLO, 'ttft="met",tpot="met"')


def slo_board() -> Dashboard:
    """Return the first board, which shows the service that users get."""
    return build_board(
        uid="quire-slo",
        title="quire / SLOs",
        description="What users get: goodput, errors and latencies against the router's targets.",
        rows={
            "Now": _now_panels(),
            "Requests": _request_panels(),
            "Latency": _latency_panels(),
        },
    )


def _now_panels() -> Sequence[Panel]:
    """Return the panels of the present state, one number each."""
    return [
        number(
            "Goodput",
            "Share of ended requests that met both targets, without those that failed because of the client.",
            quotient(MET, rate(SLO)),
            "percentunit",
        ),
        number("Good requests", "Requests within both targets.", MET, "reqps"),
        number(
            "Generated tokens",
            "Tokens sent to clients.",
            rate("quire_generation_tokens_total"),
            "short",
        ),
        number(
            "Under way",
            "Requests accepted and not finished.",
            total("quire_router_requests_running"),
            "short",
        ),
    ]


def _request_panels() -> Sequence[Panel]:
    """Return the panels of requests by their ends and targets, and of their tokens."""
    return [
        chart(
            "Requests by end",
            "Finished requests by reason, failed requests by gRPC status, and refused requests.",
            [
                Target(
                    rate("quire_request_success_total", by="finished_reason"),
                    "{{finished_reason}}",
                ),
                Target(rate("quire_request_failure_total", by="grpc_code"), "{{grpc_code}}"),
                Target(rate("quire_admission_rejections_total", by="reason"), "refused: {{reason}}"),
            ],
            "reqps",
            is_stacked=True,
        ),
        line(
            "Requests by target",
            "Requests that met or missed the targets for TTFT and for TPOT.",
            rate(SLO, by="ttft, tpot"),
            "TTFT {{ttft}}, TPOT {{tpot}}",
            "reqps",
            is_stacked=True,
        ),
        chart(
            "Tokens",
            "Prompt tokens, prompt tokens with cached KV, and generated tokens.",
            [
                Target(rate("quire_prompt_tokens_total"), "prompt"),
                Target(rate("quire_prompt_tokens_cached_total"), "prompt, cached"),
                Target(rate("quire_generation_tokens_total"), "generated"),
            ],
        ),
    ]


def _latency_panels() -> Sequence[Panel]:
    """Return the panels of latencies and of the lengths of prompts and answers."""
    return [
        latency("TTFT", TTFT, "From arrival at the router to the first token.", "ttft"),
        latency("TPOT", TPOT, "Mean time of an answer's tokens after its first.", "tpot"),
        latency("ITL", ITL, "Between two messages with tokens."),
        latency("End to end", E2E, "From arrival to the last token."),
        distribution(
            "Prompt length",
            "Prompt tokens of accepted requests.",
            "quire_request_prompt_tokens",
            "short",
        ),
        distribution(
            "Answer length",
            "Tokens of a request's answers.",
            "quire_request_generation_tokens",
            "short",
        ),
    ]
