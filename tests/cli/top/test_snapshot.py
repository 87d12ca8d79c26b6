"""What ``quire top`` computes from snapshots, and how it takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry, Counter, ProcessCollector, start_http_server

from quire.cli.top.snapshot import ROUTER, Change, History, Name, parse, take_snapshot
from quire.client.admin import RouterStatus, TenantStatus
from tests.testing.snapshots import counters, snapshot, worker

TOKENS = (Name.STEP_TOKENS, "")


def test_samples_are_summed_over_the_labels_that_are_not_read() -> None:
    page = parse(
        "# TYPE quire_kv_transfer_bytes counter\n"
        'quire_kv_transfer_bytes_total{direction="sent",transport="messages"} 3.0\n'
        'quire_kv_transfer_bytes_total{direction="sent",transport="shared"} 4.0\n'
        'quire_kv_transfer_bytes_total{direction="lent",transport="shared"} 9.0\n'
        "quire_another_total 1.0\n"
    )
    assert page == {(Name.MOVED_BYTES, "sent"): 7.0, (Name.MOVED_BYTES, "lent"): 9.0}


def test_a_rate_is_the_growth_divided_by_the_seconds() -> None:
    before = snapshot(10.0, worker("d"), d=counters(1, STEP_TOKENS=100, PUSHES=2))
    now = snapshot(14.0, worker("d"), d=counters(1, STEP_TOKENS=300, PUSHES=4))
    change = Change(now, before)
    assert change.rate(TOKENS, of="d") == 50.0
    assert change.rate(TOKENS, (Name.PUSHES, ""), of="d") == 50.5
    assert change.rate_of_workers(Name.STEP_TOKENS) == 50.0
    assert Change(now, None).rate(TOKENS, of="d") is None


def test_a_process_that_started_again_has_counted_from_zero() -> None:
    """Also where it has already counted more than before."""
    before = snapshot(0.0, worker("d"), d=counters(1, STEP_TOKENS=100))
    for count in (40, 400):
        now = snapshot(2.0, worker("d"), d=counters(2, STEP_TOKENS=count))
        assert Change(now, before).rate(TOKENS, of="d") == count / 2


def test_new_lost_and_unreachable_workers_have_no_rate() -> None:
    before = snapshot(0.0, worker("gone"), worker("stays"), gone=counters(1), stays=counters(1))
    grown = counters(1, STEP_TOKENS=8)
    now = snapshot(1.0, worker("stays"), worker("new"), worker("mute"), stays=grown, new=grown)
    change = Change(now, before)
    assert [change.rate(TOKENS, of=name) for name in ("stays", "new", "mute", "gone")] == [
        8.0,
        None,
        None,
        None,
    ]
    assert change.rate_of_workers(Name.STEP_TOKENS) == 8.0
    assert change.rate((Name.PROMPT_TOKENS, "")) is None


def first_tokens(*counts: float, started: float = 1) -> dict[tuple[str, str], float]:
    bounds = ("0.1", "0.2", "1.0", "+Inf")
    buckets = {(str(Name.TTFT), bound): count for bound, count in zip(bounds, counts, strict=True)}
    return counters(started) | buckets


@pytest.mark.parametrize(
    ("share", "counts", "seconds"),
    [
        (0.5, (10, 10, 10, 10), 0.05),
        (0.5, (0, 10, 10, 10), 0.15),
        (0.99, (90, 90, 100, 100), 0.92),
        (0.99, (0, 0, 0, 4), 1.0),  # slower than the last bound, of which no more is known
        (0.5, (0, 0, 0, 0), None),
    ],
)
def test_percentiles_are_those_of_the_histogram(share: float, counts: Any, seconds: float | None) -> None:
    now = snapshot(9.0, router=first_tokens(*counts))
    assert Change(now, None).time_to_first_token(share) == pytest.approx(seconds)
    earlier = snapshot(1.0, router=first_tokens(7, 8, 9, 10))
    later = snapshot(9.0, router=first_tokens(*(a + b for a, b in zip(counts, (7, 8, 9, 10), strict=True))))
    assert Change(later, earlier).time_to_first_token(share) == pytest.approx(seconds)


def test_without_the_routers_metrics_nothing_is_known_of_first_tokens_and_hits() -> None:
    change = Change(snapshot(1.0, router=counters(1)), snapshot(0.0, router=counters(1)))
    assert (change.time_to_first_token(0.5), change.hit_ratio()) == (None, None)
    change = Change(snapshot(1.0), None)
    assert (change.time_to_first_token(0.5), change.hit_ratio()) == (None, None)


def test_hits_are_a_share_of_the_prompt_tokens() -> None:
    before = snapshot(0.0, router=counters(1, PROMPT_TOKENS=100, CACHED_TOKENS=90))
    now = snapshot(1.0, router=counters(1, PROMPT_TOKENS=300, CACHED_TOKENS=140))
    assert Change(now, before).hit_ratio() == 0.25


def test_the_history_compares_with_the_last_snapshot_and_with_the_minute() -> None:
    history = History()
    history.add(snapshot(0.0, router=counters(1)))
    assert (history.last.before, history.minute.before, list(history.trend)) == (None, None, [])
    for second in range(1, 101):
        history.add(snapshot(float(second), router=counters(1, GENERATED_TOKENS=5 * second)))
    assert history.last.before is not None
    assert history.minute.before is not None
    assert (history.last.before.seconds, history.minute.before.seconds) == (99.0, 40.0)
    assert list(history.trend) == [5.0] * 60


@pytest.fixture
def metrics_address() -> Iterator[str]:
    registry = CollectorRegistry()
    Counter(Name.SUCCESSES, "Requests.", ["finished_reason"], registry=registry).labels("stop").inc(3)
    ProcessCollector(registry=registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_snapshot_has_the_metrics_that_were_reached(metrics_address: str) -> None:
    tenants = (TenantStatus("acme", 2, 1, 70),)
    client = Mock(status=lambda: RouterStatus((worker("d"),), tenants, metrics_address))
    taken = take_snapshot(client)
    assert set(taken.pages) == {ROUTER}  # nothing listens at the worker's address
    assert Change(taken, None).increase(Name.SUCCESSES) == 3.0
    assert taken.pages[ROUTER][Name.STARTED, ""] > 0
    assert taken.status.tenants == tenants
