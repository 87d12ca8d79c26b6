"""Where the time to the first token goes."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.boards.shared import (
    PHASE,
    TTFT,
)
from quire.observability.dashboard import build_board
from quire.observability.panels import Panel, Target, chart, distribution, line, side_by_side
from quire.observability.promql import quantile, quotient, rate, share_of_all
from quire.services.server.phases import HAND_OVER, PROMPT_PHASES, ROUTER_PHASES, Phase

BEFORE_FIRST_TOKEN = "|".join((*ROUTER_PHASES, *PROMPT_PHASES))
AFTER_FIRST_TOKEN = "|".join(HAND_OVER)


def _share(phase: Phase, count: str) -> Target:
    """Return a phase's time for each counted request; each phase is a separate target to keep the order."""
    seconds = rate(f"{PHASE}_sum", f'phase="{phase}"')
    return Target(quotient(seconds, count), phase)


FIRST_TOKENS = rate(f"{TTFT}_count")
ALL_BEFORE = rate(f"{PHASE}_sum", f'phase=~"{BEFORE_FIRST_TOKEN}"')
PUSHES = rate(f"{PHASE}_count", 'phase="transfer"')


def ttft_board() -> Dashboard:
    """Return the board of phases."""
    return build_board(
        uid="quire-ttft",
        title="quire / TTFT decomposition",
        description="Where the time to the first token goes, and the time from there to the second.",
        rows={
            "Mean of a request": _mean_panels(),
            "Slow requests": _slow_panels(),
        },
    )


def _mean_panels() -> Sequence[Panel]:
    """Return the panels of mean times by phase, before and after the first token."""
    return [
        chart(
            "To the first token",
            "Time of each phase / first tokens. The rest is TTFT minus all phases: the network and"
            " the event loops.",
            [
                *(_share(phase, FIRST_TOKENS) for phase in (*ROUTER_PHASES, *PROMPT_PHASES)),
                Target(f"clamp_min(({rate(TTFT + '_sum')} - {ALL_BEFORE}) / {FIRST_TOKENS}, 0) >= 0", "rest"),
            ],
            "s",
            is_stacked=True,
        )
        .span(12)
        .height(10),
        chart(
            "From the first token to the second",
            "Time of each phase / pushes. A push overlaps with the computation; only the time"
            " after it counts here.",
            [_share(phase, PUSHES) for phase in HAND_OVER],
            "s",
            is_stacked=True,
        )
        .span(12)
        .height(10),
    ]


def _slow_panels() -> Sequence[Panel]:
    """Return the panels of slow requests by phase, and of repeated phases."""
    return side_by_side(
        2,
        [
            line(
                "p95 by phase, to the first token",
                "95th percentile of each phase by itself; these do not add up.",
                quantile(0.95, PHASE, f'phase=~"{BEFORE_FIRST_TOKEN}"', "phase"),
                "{{phase}}",
                "s",
            ),
            line(
                "p95 by phase, to the second",
                "95th percentile of each phase by itself; these do not add up.",
                quantile(0.95, PHASE, f'phase=~"{AFTER_FIRST_TOKEN}"', "phase"),
                "{{phase}}",
                "s",
            ),
            distribution("TTFT", "Distribution of the time to the first token.", TTFT, "s"),
            line(
                "Phases per request",
                "Observations of each phase / first tokens: above 1, attempts were repeated.",
                share_of_all(rate(f"{PHASE}_count", f'phase=~"{BEFORE_FIRST_TOKEN}"', "phase"), FIRST_TOKENS),
                "{{phase}}",
            ),
        ],
    )
