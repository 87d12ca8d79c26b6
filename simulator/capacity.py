"""Finds the number of workers that an objective needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.simulator.calibration import Calibration
from quire.simulator.cluster import ClusterConfig, replay
from quire.simulator.figures import Figures, Slo, figures
from quire.simulator.trace import TraceRequest


class Trial(NamedTuple):
    """A cluster that was simulated, and its figures."""

    num_prefill: int
    num_decode: int
    figures: Figures


class NotWithinReach(ValueError):
    """No cluster of the allowed size meets the objective. The message has the figures of the largest one."""


def smallest_cluster(
    config: ClusterConfig,
    calibration: Calibration,
    requests: Sequence[TraceRequest],
    slo: Slo,
    max_workers: int,
    on_trial: Callable[[], None] = lambda: None,
) -> Trial:
    """Return the cluster with the fewest workers that meets an objective.

    For each number of workers the balanced split is tried first, then less balanced ones.

    Args:
        config: the cluster; its numbers of workers are ignored.
        max_workers: most workers to try.

    Raises:
        NotWithinReach: even ``max_workers`` do not suffice.
    """
    tried: list[Trial] = []

    def first_good(total: int) -> Trial | None:
        for num_prefill in _splits(total):
            shape = replace(config, num_prefill=num_prefill, num_decode=total - num_prefill)
            outcome = figures(replay(shape, calibration, requests), slo)
            tried.append(Trial(num_prefill, total - num_prefill, outcome))
            on_trial()
            if outcome.slo_share >= slo.share:
                return tried[-1]
        return None

    # Doubling finds a number that suffices; bisection then finds the smallest.
    too_few, enough = 0, 1
    while (result := first_good(enough)) is None:
        if enough >= max_workers:
            best = max(tried, key=lambda trial: trial.figures.slo_share)
            raise NotWithinReach(
                f"{max_workers} workers do not suffice: at best {best.figures.slo_share:.1%} of the requests "
                f"meet the objective, with {best.num_prefill} prefill and {best.num_decode} decode workers; "
                "allow more workers, or a looser objective"
            )
        too_few, enough = enough, min(max_workers, 2 * enough)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (found := first_good(middle)) is None:
            too_few = middle
        else:
            enough, result = middle, found
    return result


def _splits(total: int) -> Iterator[int]:
    """Yield numbers of prefill workers for a total: evenly spaced from 0 on, the balanced one first."""
    num_splits = min(total, 10)
    splits = {round(total * i / num_splits) for i in range(num_splits)}
    yield from sorted(splits, key=lambda split: abs(split - total / 2))
