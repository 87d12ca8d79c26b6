"""Collectives over connections: the bits of one tree, and an error as soon as a rank has failed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from quire.engine.parallel.collectives import RanksError, SharedMemory, SharedSizes, pieces
from quire.engine.parallel.link import FrameKind
from quire.engine.parallel.link_collectives import LinkCollectives
from quire.engine.parallel.shares import Shares
from tests.engine.linked_ranks import link_pair

NUM_ROWS, VOCAB_SIZE = 200, 300
"""Sums of this many rows are too large for the messages of two ranks to cross."""


@contextmanager
def ranks(num_ranks: int) -> Iterator[list[LinkCollectives]]:
    pairs = [link_pair() for _ in range(1, num_ranks)]
    sizes = SharedSizes(num_ranks, NUM_ROWS, 128, VOCAB_SIZE, 0)
    first = LinkCollectives(SharedMemory(sizes), [ours for ours, _ in pairs], 0)
    others = [
        LinkCollectives(SharedMemory(sizes), [theirs], rank) for rank, (_, theirs) in enumerate(pairs, 1)
    ]
    try:
        yield [first, *others]
    finally:
        for each in (link for pair in pairs for link in pair):
            each.close()
        for collectives in (first, *others):
            os.close(collectives.memory.descriptor)


def run(all_ranks: list[LinkCollectives], work: Callable[[LinkCollectives], Any]) -> list[Any]:
    """Run a function in a thread for each rank; return their results."""
    with ThreadPoolExecutor(len(all_ranks)) as pool:
        return [each.result(timeout=60) for each in [pool.submit(work, rank) for rank in all_ranks]]


def in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """Add tensors in pairs, the pairs in pairs, and so on."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("num_rows", [0, 1, NUM_ROWS])
def test_sums_are_added_in_one_tree(num_ranks: int, num_rows: int) -> None:
    borders = np.array(Shares(8).borders(num_ranks))
    generator = torch.Generator().manual_seed(num_ranks)
    segments = [torch.randn((num_rows, 128), generator=generator) for _ in range(8)]

    def work(collectives: LinkCollectives) -> torch.Tensor:
        first, end = borders[collectives.rank : collectives.rank + 2]
        own = segments[first:end]
        partials = [in_pairs(own[each.start : each.stop]) for each in pieces(borders, collectives.rank)]
        return [collectives.sum(partials, borders) for _ in range(3)][-1]

    with ranks(num_ranks) as all_ranks:
        for total in run(all_ranks, work):
            assert torch.equal(total, in_pairs(segments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rank_0_gets_all_logits(dtype: torch.dtype) -> None:
    logits = torch.randn((5, VOCAB_SIZE)).to(dtype)

    def work(collectives: LinkCollectives) -> torch.Tensor:
        own = slice(*collectives.column_borders[collectives.rank : collectives.rank + 2])
        return collectives.gather_logits(logits[:, own])

    with ranks(3) as all_ranks:
        for _ in range(2):
            first, *_ = run(all_ranks, work)
            assert torch.equal(first[:, :VOCAB_SIZE], logits.float())


def test_a_failure_ends_all_that_follows() -> None:
    """What a failed rank still had under way must not be taken for the answer to something else."""
    borders, partials = np.array([0, 4, 8]), [torch.ones(2, 128)]
    with ranks(2) as (first, second):
        second._links[0].close()
        with pytest.raises(RanksError, match="closed the connection"):
            first.sum(partials, borders)
        with pytest.raises(RanksError, match="closed the connection"):
            first.gather_logits(torch.ones(2, 128))
        with pytest.raises(RanksError, match="closed the connection"):
            first.send(FrameKind.STEP)
