"""Collectives between processes: the same bits as one tree, in any number of rounds, and no hang."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.model.collectives import Collectives, RanksError, SharedMemory, SharedSizes, pieces
from quire.engine.model.parallel_shares import Shares
from quire.kernels.cpu import exchange
from tests.testing.linear_layers import in_pairs

_FORK = multiprocessing.get_context("fork")


def shared(num_ranks: int) -> SharedMemory:
    return SharedMemory(SharedSizes(num_ranks, 16, 100, 300, 4096))


def run_ranks(memory: SharedMemory, work: Callable[[Collectives], object]) -> list[Any]:
    """Run a function in a process for each rank; return their results."""
    exchange.sum_kernel()
    queue = _FORK.Queue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        queue.put((rank, work(Collectives(memory, rank))))

    processes = [_FORK.Process(target=run, args=(rank,)) for rank in range(memory.sizes.num_ranks)]
    for process in processes:
        process.start()
    results = dict(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    return [results[rank] for rank in sorted(results)]


def segment_sum(segment: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + segment)
    return torch.randn((1 + number % 16, 128), generator=generator)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_sums_are_added_in_one_tree(num_ranks: int) -> None:
    """A rank adds the segments of each of its pieces, and the ranks add the pieces."""
    num_sums = 40
    borders = np.array(Shares(8).borders(num_ranks))

    def work(collectives: Collectives) -> list[Any]:
        own = range(*borders[collectives.rank : collectives.rank + 2])
        results = []
        for number in range(num_sums):
            segments = [segment_sum(own[0] + each, number) for each in range(len(own))]
            partials = [
                in_pairs(segments[each.start : each.stop]) for each in pieces(borders, collectives.rank)
            ]
            results.append(collectives.sum(partials, borders).tolist())
        return results

    results = run_ranks(shared(num_ranks), work)
    for number in range(num_sums):
        expected = in_pairs([segment_sum(each, number) for each in range(8)])
        assert all(result[number] == expected.tolist() for result in results)


@pytest.mark.parametrize("num_segments", [1, 2, 4, 8])
def test_pieces_are_subtrees_in_order(num_segments: int) -> None:
    for first, end in itertools.combinations(range(num_segments + 1), 2):
        found = pieces(np.array([first, end]), 0)
        assert [each for piece in found for each in piece] == list(range(end - first))
        assert len(found) <= exchange.MOST_PIECES
        for piece in found:
            assert (first + piece.start) % len(piece) == 0
            assert len(piece).bit_count() == 1


def test_a_rank_that_waits_does_not_compute() -> None:
    process_ids = _FORK.Array("i", 3)

    def sleep(process_id: int) -> bool:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] == "S"

    def work(collectives: Collectives) -> bool:
        process_ids[collectives.rank] = os.getpid()
        num_asleep = 0
        if collectives.rank == 0:
            # A rank that computed while it waits would not be asleep so many times in a row.
            until = time.monotonic() + 30
            while num_asleep < 20 and time.monotonic() < until:
                time.sleep(0.005)
                others = process_ids[1:]
                num_asleep = num_asleep + 1 if all(others) and all(map(sleep, others)) else 0
        collectives.meet()
        return collectives.rank > 0 or num_asleep == 20

    assert all(run_ranks(shared(3), work))


def test_no_wake_up_is_lost() -> None:
    """Ranks come at random times, so that some sleep, and none sleeps until it looks for failures."""
    num_rounds = 300

    def work(collectives: Collectives) -> float:
        delays = random.Random(collectives.rank)
        collectives.meet()
        began_at = time.monotonic()
        for _ in range(num_rounds):
            collectives._patience[:] = 60, 0
            time.sleep(delays.choice([0.0, 0.0, 0.0002]))
            collectives.meet()
        return time.monotonic() - began_at

    assert max(run_ranks(shared(4), work)) < 30


def test_logits_are_gathered() -> None:
    def work(collectives: Collectives) -> list[Any]:
        mine = torch.full((3, 128 if collectives.rank == 0 else 192), float(collectives.rank))
        return collectives.gather_logits(mine, 128 * collectives.rank).tolist()

    expected = torch.cat([torch.zeros(3, 128), torch.ones(3, 192)], dim=1).tolist()
    assert run_ranks(shared(2), work) == [expected, expected]


def test_a_rank_that_waits_for_a_failed_one_gets_an_error() -> None:
    memory = shared(2)

    def work(collectives: Collectives) -> str:
        if collectives.rank == 1:
            time.sleep(0.3)
            collectives.memory.break_off()
            return "failed"
        with pytest.raises(RanksError):
            collectives.meet()
        return "told"

    assert run_ranks(memory, work) == ["told", "failed"]


def test_sums_that_are_too_large_are_refused() -> None:
    collectives = Collectives(shared(2), 0)
    with pytest.raises(RanksError, match="17 x 128"):
        collectives.sum([torch.zeros(17, 128)], np.array([0, 1, 2]))
    with pytest.raises(RanksError, match="17 rows"):
        collectives.logits(17)
