"""Runs a workload on all sides in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from quire.benchmarks.peers.processes import Answer, SideFailedError
from quire.benchmarks.peers.workloads import Requests, Workload


class Side(Protocol):
    """What answers requests: a ``SideProcess``."""

    def generate(self, requests: Requests) -> Answer:
        """Answer requests; raises ``SideFailedError``."""
        ...


class Rounds(NamedTuple):
    """What the rounds of a workload gave.

    Attributes:
        rates: tokens per second of each round, by side.
        first_tokens: by side, the share of answers whose first token is quire's; empty without quire.
        failures: by side that failed, the reason; such a side has no rates.
    """

    rates: Mapping[str, list[float]]
    first_tokens: Mapping[str, float]
    failures: Mapping[str, str]


def run_rounds(
    workload: Workload,
    sides: Mapping[str, Side],
    vocab_size: int,
    num_rounds: int,
    report_progress: Callable[[str], None],
) -> Rounds:
    """Run a workload on all sides, once to warm up and then in ``num_rounds`` rounds, in rotating order."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    answers: dict[str, list[list[int]]] = {}
    failures: dict[str, str] = {}
    for round_index in range(num_rounds + 1):
        requests = workload.requests(vocab_size, seed=round_index)
        for side in rotated(list(sides), round_index):
            if side in failures:
                continue
            try:
                answer = sides[side].generate(requests)
            except SideFailedError as error:
                failures[side] = str(error)
                del rates[side]
                answers.pop(side, None)
                continue
            answers[side] = answer.tokens
            rate = workload.num_tokens(requests) / answer.seconds
            name = f"round {round_index}" if round_index else "warm-up"
            report_progress(f"{workload.name}, {name}: {side} {rate:.0f} tokens/s")
            if round_index:
                rates[side].append(rate)
    return Rounds(rates, shares_of_first_tokens(answers), failures)


def rotated(sides: list[str], by: int) -> list[str]:
    """Return the sides in the order of a round, in which another side is first each time."""
    first = by % len(sides)
    return sides[first:] + sides[:first]


def shares_of_first_tokens(answers: Mapping[str, list[list[int]]]) -> dict[str, float]:
    """Return, for each other side, the share of answers whose first token is quire's."""
    if "quire" not in answers:
        return {}
    own = [tokens[0] for tokens in answers["quire"]]
    return {
        side: sum(tokens[0] == token for tokens, token in zip(others, own, strict=True)) / len(own)
        for side, others in answers.items()
        if side != "quire"
    }
