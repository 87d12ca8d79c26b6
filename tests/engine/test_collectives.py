"""Collectives between processes: the same bits as one tree, in any number of rounds, and no hang."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.engine.parallel.collectives import Collectives, RanksError, SharedMemory, SharedSizes
from quire.kernels.cpu import exchange

_FORK = multiprocessing.get_context("fork")


def shared(num_ranks: int) -> SharedMemory:
    return SharedMemory(SharedSizes(num_ranks, 16, 100, 300, 4096))


def run_ranks(memory: SharedMemory, work: Callable[[Collectives], object]) -> list[Any]:
    """Run a function in a process for each rank; return their results."""
    exchange.sum_kernel()
    exchange.meeting_kernel()
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


def partial(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn((1 + number % 16, 128), generator=generator)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_sums_are_added_in_one_tree(num_ranks: int) -> None:
    num_sums = 40

    def work(collectives: Collectives) -> list[Any]:
        return [collectives.sum(partial(collectives.rank, each)).tolist() for each in range(num_sums)]

    results = run_ranks(shared(num_ranks), work)
    for number in range(num_sums):
        parts = [partial(rank, number) for rank in range(num_ranks)]
        while len(parts) > 1:
            parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
        assert all(result[number] == parts[0].tolist() for result in results)


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
        collectives.sum(torch.zeros(17, 128))
    with pytest.raises(RanksError, match="17 rows"):
        collectives.logits(17)
