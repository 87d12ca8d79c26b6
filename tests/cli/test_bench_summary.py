"""The figures of a bench, from records whose figures are known."""

from __future__ import annotations

import json
import random

import pytest
from rich.console import Console

from quire.cli.bench.config import BenchConfig, Dataset
from quire.cli.bench.load import poisson_offsets
from quire.cli.bench.report import to_json, to_table
from quire.cli.bench.summary import Distribution, RequestRecord, percentile, summarize
from quire.cli.bench.workload import make_requests
from quire.client import ModelInfo

RECORDS = [
    RequestRecord(
        status="OK",
        start_seconds=10.0,
        end_seconds=10.5,
        arrivals_seconds=(10.1, 10.2, 10.5),
        prompt_tokens=100,
        cached_prompt_tokens=60,
        output_tokens=3,
    ),
    RequestRecord(
        status="OK",
        start_seconds=10.0,
        end_seconds=10.3,
        arrivals_seconds=(10.3,),
        prompt_tokens=100,
        cached_prompt_tokens=0,
        output_tokens=1,
    ),
    RequestRecord(status="RESOURCE_EXHAUSTED", start_seconds=10.0, end_seconds=10.01),
    RequestRecord(status="RESOURCE_EXHAUSTED", start_seconds=10.0, end_seconds=10.01),
    RequestRecord(status="DEADLINE_EXCEEDED", start_seconds=10.0, end_seconds=12.0),
]
MODEL = ModelInfo("demo", 512, 256, (0, 7), 16, 1, 1)


def test_throughput_counts_requests_that_succeeded() -> None:
    summary = summarize(RECORDS, duration_seconds=2.0)
    assert (summary.num_requests, summary.num_succeeded) == (5, 2)
    assert summary.failures == {"DEADLINE_EXCEEDED": 1, "RESOURCE_EXHAUSTED": 2}
    assert summary.requests_per_second == 1.0
    assert summary.output_tokens_per_second == 2.0
    assert summary.total_tokens_per_second == 102.0
    assert summary.cached_token_ratio == 0.3


def test_latencies() -> None:
    summary = summarize(RECORDS, duration_seconds=2.0)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(200)
    assert summary.ttft_ms.p50 == pytest.approx(200)
    assert summary.ttft_ms.p99 == pytest.approx(298)
    # The second request has one token: neither a time per further token, nor a gap.
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.mean == pytest.approx(200)
    assert summary.itl_ms is not None
    assert summary.itl_ms.mean == pytest.approx(200)
    assert summary.itl_ms.p99 == pytest.approx(298)
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.mean == pytest.approx(400)


def test_nothing_succeeded() -> None:
    summary = summarize(RECORDS[2:], duration_seconds=0.0)
    assert summary.requests_per_second == 0.0
    assert summary.cached_token_ratio == 0.0
    assert (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2e_ms) == (None, None, None, None)
    Console(quiet=True).print(to_table(summary, "router:8500"))
    assert json.loads(to_json(summary, BenchConfig()))["ttft_ms"] is None


def test_percentiles_interpolate() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert percentile(values, 0) == 1.0
    assert percentile(values, 50) == 2.5
    assert percentile(values, 100) == 4.0
    assert percentile([5.0], 99) == 5.0
    assert Distribution.of_seconds([]) is None


def test_json_is_one_line_with_config_and_figures() -> None:
    line = to_json(summarize(RECORDS, 2.0), BenchConfig(rate=3.0))
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["config"]["rate"] == 3.0
    assert parsed["failures"] == {"DEADLINE_EXCEEDED": 1, "RESOURCE_EXHAUSTED": 2}
    assert parsed["ttft_ms"]["p50"] == 200.0


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    offsets = poisson_offsets(50.0, 2000, random.Random(1))
    assert offsets == sorted(offsets)
    assert 2000 / offsets[-1] == pytest.approx(50.0, rel=0.1)
    assert offsets == poisson_offsets(50.0, 2000, random.Random(1))


def test_random_prompts_share_only_their_prefix() -> None:
    config = BenchConfig(num_requests=8, num_warmups=1, input_len=64, shared_prefix_len=32)
    requests = make_requests(config, MODEL)
    prompts = [list(request.prompt) for request in requests]
    assert len(prompts) == 9
    assert {len(prompt) for prompt in prompts} == {64}
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 1
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 9
    assert not {0, 7} & {token for prompt in prompts for token in prompt if isinstance(token, int)}
    assert requests == make_requests(config, MODEL)


def test_prompts_of_notes_are_conversations_of_about_that_length() -> None:
    config = BenchConfig(num_requests=3, num_warmups=0, dataset=Dataset.NOTES, input_len=80)
    prompts = [request.prompt for request in make_requests(config, MODEL)]
    contents = [each["content"] for prompt in prompts for each in prompt if isinstance(each, dict)]
    assert len(contents) == len(set(contents)) == 3
    assert all(content.count(" is ") == 11 for content in contents)


def test_contradicting_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shared-prefix-len"):
        BenchConfig(input_len=8, shared_prefix_len=9)
    with pytest.raises(ValueError, match="exceed the model's 512 tokens"):
        make_requests(BenchConfig(input_len=500, output_len=64), MODEL)
