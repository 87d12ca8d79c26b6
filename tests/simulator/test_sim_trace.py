"""Traces: their file format, and synthetic ones of the published shape."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from quire.simulator.trace import (
    TRACE_BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    read_trace,
    reusable_share,
    scaled,
    write_trace,
)
from quire.simulator.workload import MOONCAKE_OUTPUT_TOKENS, MOONCAKE_RATE, Workload, make_requests


def test_the_published_format_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 3052, "input_length": 1000, "output_length": 5, "hash_ids": [0, 3]}\n\n'
        '{"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n'
    )
    requests = read_trace(path)
    assert requests == [TraceRequest(0.0, 600, 7, (0, 1)), TraceRequest(3.052, 1000, 5, (0, 3))]
    assert [request.arrival_seconds for request in scaled(requests, 2.0)] == [0.0, 1.526]
    write_trace(path, requests)
    assert read_trace(path) == requests
    assert read_trace(path, block_tokens=1000) == requests
    with pytest.raises(TraceError, match="each 16 tokens of input_length, so at least 38; got 2"):
        read_trace(path, block_tokens=16)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", ":1: must have"),
        ('{"timestamp": 1}', ":1: must have"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}', ":1: input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "from 0 to"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}', ":1: .* not finite"),
        ('{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [0]}', "at least 2; got 1"),
        ("[" * 100_000, ":1: must have"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            ":1: must have .*interpreted as an integer",
        ),
        ("", "holds no requests"),
    ],
)
def test_a_bad_line_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=problem):
        read_trace(path)


def test_only_prefixes_seen_before_can_be_reused() -> None:
    requests = [
        TraceRequest(0.0, 40, 1, (1, 2, 3)),
        TraceRequest(1.0, 40, 1, (1, 4, 3)),
        TraceRequest(2.0, 20, 1, (1, 4)),
    ]
    assert reusable_share(requests, 16) == (0 + 16 + 19) / 100


def test_mooncakes_shape() -> None:
    requests = make_requests(Workload.MOONCAKE, 8000, MOONCAKE_RATE, seed=0)
    assert mean(r.input_tokens for r in requests) == pytest.approx(7590, rel=0.1)
    assert mean(r.output_tokens for r in requests) == pytest.approx(MOONCAKE_OUTPUT_TOKENS, rel=0.1)
    assert reusable_share(requests, TRACE_BLOCK_TOKENS) == pytest.approx(0.5, abs=0.05)
    assert 8000 / requests[-1].arrival_seconds == pytest.approx(MOONCAKE_RATE, rel=0.05)
    assert all(len(r.block_ids) == -(-r.input_tokens // TRACE_BLOCK_TOKENS) for r in requests)


@pytest.mark.parametrize(("workload", "share"), [(Workload.SHARED, 0.75), (Workload.UNIQUE, 0.0)])
def test_simple_shapes(workload: Workload, share: float) -> None:
    requests = make_requests(workload, 2000, 10.0, seed=1, block_tokens=16)
    assert requests == make_requests(workload, 2000, 10.0, seed=1, block_tokens=16)
    assert {(r.input_tokens, r.output_tokens, len(r.block_ids)) for r in requests} == {(1024, 64, 64)}
    assert reusable_share(requests, 16) == pytest.approx(share, abs=0.02)


def test_a_turn_has_all_before_it_in_its_prompt() -> None:
    requests = make_requests(Workload.CHAT, 400, 10.0, seed=1, input_tokens=160, block_tokens=16)
    assert {r.input_tokens for r in requests} == {160, 320, 480, 640}
    firsts = {r.block_ids for r in requests if r.input_tokens == 160}
    complete = sum(1 for r in requests if r.input_tokens == 320 and r.block_ids[:10] in firsts)
    assert complete == sum(1 for r in requests if r.input_tokens == 320)
