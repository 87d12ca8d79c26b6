"""Plots of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from quire.simulator.cluster import RequestOutcome


def plot_policies(replays: Mapping[str, Sequence[RequestOutcome]], path: Path) -> None:
    """Plot, for each policy, the cumulative distribution of the time to the first token."""
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
