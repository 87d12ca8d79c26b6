"""The baselines of the paper's tables: the buddy allocator, and what each slot is counted as."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `bench`")

from quire.benchmarks.paper.allocators import BuddyAllocator, Contiguous, StaticBatch, baselines
from quire.benchmarks.paper.fragmentation import SlotUse, account, simulate
from quire.benchmarks.paper.memory_use import measure_engine
from quire.benchmarks.paper.workload import ALPACA, MAX_LENGTH, SHAREGPT, Request


def test_buddies_split_and_merge() -> None:
    buddies = BuddyAllocator(16)
    first, second = buddies.allocate(3), buddies.allocate(5)
    assert (first, second) == (0, 8)
    assert buddies.num_free == 4
    assert buddies.allocate(8) is None, "4 are free, and no 8 in a row"
    buddies.free(0)
    assert buddies.allocate(8) == 0, "the halves have merged"


def test_a_pool_is_cut_into_powers_of_two() -> None:
    buddies = BuddyAllocator(13)
    assert [buddies.allocate(size) for size in (8, 4, 1)] == [0, 8, 12]
    assert buddies.num_free == 0


@pytest.mark.parametrize("num_slots", [64, 100, 15_680])
def test_runs_never_overlap_and_all_merge_in_the_end(num_slots: int) -> None:
    rng = random.Random(num_slots)
    buddies = BuddyAllocator(num_slots)
    whole = [buddies.allocate(1 << order) for order in reversed(range(14)) if num_slots >> order & 1]
    for start in whole:
        assert start is not None
        buddies.free(start)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and rng.random() < 0.45:
            start = rng.choice(list(held))
            del held[start]
            buddies.free(start)
        else:
            wanted = rng.randint(1, num_slots // 4)
            if (found := buddies.allocate(wanted)) is not None:
                held[found] = 1 << (wanted - 1).bit_length()
        taken = [slot for start, length in held.items() for slot in range(start, start + length)]
        assert len(taken) == len(set(taken)) == num_slots - buddies.num_free
    for start in held:
        buddies.free(start)
    assert [buddies.allocate(1 << o) for o in reversed(range(14)) if num_slots >> o & 1] == whole


def test_each_slot_is_counted_once() -> None:
    use = account([(10, 4, 7), (8, 8, 8), (6, 0, 0)], num_slots=32)
    assert use == SlotUse(states=12, reserved=3, internal=9, external=8)
    assert use.percent == (37.5, 9.375, 28.125, 25.0)


def test_a_static_batch_waits_for_its_last_request() -> None:
    batch = StaticBatch(num_slots=20, max_length=10)
    request = Request(2, 3)
    assert [batch.place(index, request) for index in range(3)] == [True, True, False]
    batch.close()
    batch.finish(0)
    assert not batch.place(2, request)
    batch.finish(1)
    assert batch.place(2, request)


def test_a_reservation_for_the_longest_wastes_what_is_never_used() -> None:
    admission = Contiguous(16, lambda request: 16)
    load = simulate(admission, [Request(2, 2)] * 8, num_slots=16)
    # Two steps each: with 2 and with 3 of the 4 tokens that there will be.
    assert load.use.percent == (15.625, 9.375, 75.0, 0.0)
    assert load.mean_running == 1.0


def test_paging_wastes_less_than_every_reservation() -> None:
    requests = SHAREGPT.draw(120)
    paged = measure_engine(requests, 4096, block_size=16)
    assert paged.use.percent[0] > 90
    for admission in baselines(4096, MAX_LENGTH).values():
        reserved = simulate(admission, requests, 4096)
        assert reserved.use.percent[0] < 50
        assert reserved.mean_running < paged.mean_running
        assert sum(reserved.use) == 4096 * reserved.num_steps


@pytest.mark.parametrize("lengths", [SHAREGPT, ALPACA])
def test_lengths_have_the_published_means(lengths: object) -> None:
    assert isinstance(lengths, type(SHAREGPT))
    requests = lengths.draw(4000)
    means = [sum(column) / len(requests) for column in zip(*requests, strict=True)]
    assert means == pytest.approx(lengths.means, rel=0.02)
    assert all(sum(request) <= MAX_LENGTH and min(request) >= 1 for request in requests)
    assert requests == lengths.draw(4000)
