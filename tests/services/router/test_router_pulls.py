"""What the router learns of pulls and makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from quire.protos import kvtransfer_pb2, worker_pb2
from quire.services.router.pulls import MovingAverages, PullPlanner
from quire.services.router.workers import Worker

# A block of 16 tokens has 1 MiB.
LAYOUT = kvtransfer_pb2.KvLayout(
    num_layers=32, num_kv_heads=8, block_size=16, head_dim=32, dtype="float32", model_digest="m"
)
BLOCK_BYTES = 1 << 20


def make_worker(name: str) -> Worker:
    info = worker_pb2.GetWorkerInfoResponse(worker_id=name, epoch=f"epoch of {name}", layout=LAYOUT)
    connection: Any = None
    return Worker(f"{name}:1", info, connection)


@pytest.fixture
def workers() -> list[Worker]:
    return [make_worker("idle"), make_worker("holder")]


def plan(planner: PullPlanner, workers: list[Worker], **held: int) -> worker_pb2.PullSource | None:
    return planner.plan("r", workers[0], workers, held, 1600)


def test_a_holder_is_pulled_from(workers: list[Worker]) -> None:
    planner = PullPlanner()
    source = plan(planner, workers, holder=1600)
    assert source is not None
    assert (source.address, source.epoch, source.num_blocks) == ("holder:1", "epoch of holder", 100)
    # 105 ms at 1 GB/s and 5 ms, twice, and half a second.
    assert source.timeout_ms == pytest.approx(720, abs=1)


def test_nobody_pulls_from_itself_or_what_it_holds(workers: list[Worker]) -> None:
    assert plan(PullPlanner(), workers, idle=1600) is None
    assert plan(PullPlanner(), workers, idle=1600, holder=1600) is None
    assert plan(PullPlanner(), workers) is None


def test_a_slow_peer_is_done_without(workers: list[Worker]) -> None:
    planner = PullPlanner()
    source = plan(planner, workers, holder=1600)
    assert source is not None
    planner.pulled(source, worker_pb2.PullSummary(num_blocks=8, num_bytes=8 * BLOCK_BYTES, seconds=1.0))
    assert plan(planner, workers, holder=1600) is None


def test_a_failed_pull_says_nothing_of_the_speed(workers: list[Worker]) -> None:
    planner = PullPlanner()
    source = plan(planner, workers, holder=1600)
    assert source is not None
    failed = worker_pb2.PullSummary(num_blocks=1, num_bytes=BLOCK_BYTES, seconds=1.0, failure="timeout")
    planner.pulled(source, failed)
    assert plan(planner, workers, holder=1600) == source


def test_a_fast_worker_computes(workers: list[Worker]) -> None:
    planner = PullPlanner()
    planner.computed(workers[0], 63, 1e-6)
    assert plan(planner, workers, holder=1600) is not None
    planner.computed(workers[0], 1000, 0.01)
    assert plan(planner, workers, holder=1600) is None


def test_averages_follow_what_is_measured() -> None:
    averages = MovingAverages(5.0)
    assert averages.get("a") == 5.0
    averages.add("a", 10.0)
    assert averages.get("a") == 10.0
    averages.add("a", 20.0)
    assert averages.get("a") == pytest.approx(13.0)
    assert averages.get("b") == 5.0
