"""Computes and plots the figures of a run from the outcomes of simulated requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.simulator.cluster import Replay, RequestOutcome


@dataclass(frozen=True, slots=True)
class Slo:
    """The objective that requests must meet.

    Attributes:
        ttft_seconds: longest time to the first token.
        tpot_seconds: longest mean time of each further token.
        share: share of the requests that must meet both limits; refused requests count as missing them.
    """

    ttft_seconds: float
    tpot_seconds: float
    share: float = 0.9


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run."""

    num_requests: int
    num_rejected: int
    seconds: float
    requests_per_second: float
    ttft_p50_seconds: float
    ttft_p90_seconds: float
    ttft_p99_seconds: float
    tpot_p50_seconds: float
    tpot_p90_seconds: float
    cached_share: float
    """Share of the input tokens that were cached."""
    local_share: float
    """Share of the requests whose prompt the decode worker computed."""
    pulled_bytes: float
    prefill_busy_share: float
    decode_busy_share: float
    slo_share: float
    """Share of all requests that met the objective."""


def figures(replay: Replay, slo: Slo) -> Figures:
    """Return the figures of a replay."""
    done = replay.outcomes
    num_requests = len(done) + replay.num_rejected
    num_good = sum(is_good(outcome, slo) for outcome in done)
    input_tokens = sum(o.request.input_tokens for o in done)
    ttft = sorted(o.ttft_seconds for o in done)
    tpot = sorted(o.tpot_seconds for o in done)
    return Figures(
        num_requests=num_requests,
        num_rejected=replay.num_rejected,
        seconds=replay.seconds,
        requests_per_second=len(done) / replay.seconds if replay.seconds else 0.0,
        ttft_p50_seconds=quantile(ttft, 0.5),
        ttft_p90_seconds=quantile(ttft, 0.9),
        ttft_p99_seconds=quantile(ttft, 0.99),
        tpot_p50_seconds=quantile(tpot, 0.5),
        tpot_p90_seconds=quantile(tpot, 0.9),
        cached_share=sum(o.cached_tokens for o in done) / input_tokens if input_tokens else 0.0,
        local_share=sum(o.is_local for o in done) / len(done) if done else 0.0,
        pulled_bytes=sum(o.pulled_bytes for o in done),
        prefill_busy_share=replay.prefill_busy_share,
        decode_busy_share=replay.decode_busy_share,
        slo_share=num_good / num_requests if num_requests else 0.0,
    )


def is_good(outcome: RequestOutcome, slo: Slo) -> bool:
    """Return whether a request met both limits."""
    return outcome.ttft_seconds <= slo.ttft_seconds and outcome.tpot_seconds <= slo.tpot_seconds


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of the sorted values do not exceed; 0 if there are none."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * len(ordered) * 1e6) // 10**6) - 1))]


def plot_policies(replays: Mapping[str, Sequence[RequestOutcome]], path: Path) -> None:
    """Plot, for each policy, the cumulative distribution of the time to the first token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, outcomes in replays.items():
        ordered = sorted(outcome.ttft_seconds for outcome in outcomes)
        axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("time to first token (s)")
    axes.set_ylabel("share of requests")
    axes.set_title("Simulated time to first token")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
