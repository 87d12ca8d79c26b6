"""Traces, sessions, goodput and comparisons of ``quire bench serve``, against servers on the loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from typer.testing import Result

from quire.cli.bench.agents import agent_requests
from quire.cli.bench.config import BenchConfig, Dataset
from quire.cli.bench.dataset_files import read_burstgpt, read_sharegpt
from quire.cli.bench.load import closed_loop, send_session
from quire.cli.bench.summary import NOT_SENT, RequestRecord, summarize
from quire.cli.bench.workload import BenchRequest, Turn
from quire.client import AsyncClient, ModelInfo
from quire.rpc.errors import InvalidArgument
from tests.testing.fake_generation import FakeGeneration

Quire = Callable[..., Result]
TRACE = {"dataset": Dataset.BURSTGPT, "dataset_path": Path("x")}
MOONCAKE = [
    {"timestamp": 1000, "input_length": 300, "output_length": 5, "hash_ids": [1]},
    {"timestamp": 1000, "input_length": 9000, "output_length": 5, "hash_ids": list(range(18))},
    {"timestamp": 1050, "input_length": 200, "output_length": 7, "hash_ids": [1]},
    {"timestamp": 1100, "input_length": 100, "output_length": 4, "hash_ids": [2]},
]
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
45,a,3,ChatGPT,20,5,25,Conversation log
48,b,3,ChatGPT,30,0,30,Conversation log
46,c,3,GPT-4,40,6,46,API log
"""


@pytest.fixture
def bench(quire: Quire, fake_generation: FakeGeneration) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a benchmark and returns its figures."""

    def run(*options: str) -> dict[str, Any]:
        address = ("--address", fake_generation.address, "--num-warmups", "0")
        result = quire("bench", "serve", *address, *options)
        assert result.exit_code == 0, result.output
        figures: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return figures

    return run


def test_a_mooncake_trace_keeps_lengths_times_and_equal_blocks(
    bench: Any, fake_generation: FakeGeneration, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in MOONCAKE))
    trace = ("--dataset", "mooncake", "--dataset-path", str(path), "--num-requests", "3")
    figures = bench(*trace, "--trace-speed", "0.5")
    first, second, third = sorted(fake_generation.requests, key=lambda sent: -len(sent.token_ids.ids))
    assert [len(sent.token_ids.ids) for sent in (first, second, third)] == [300, 200, 100]
    assert [sent.stopping.max_tokens for sent in (first, second, third)] == [5, 7, 4]
    assert first.token_ids.ids[:200] == second.token_ids.ids
    assert first.token_ids.ids[:100] != third.token_ids.ids
    assert figures["duration_seconds"] > 0.2  # 0.1 s of the trace at half its speed


def test_a_trace_that_is_too_short_is_a_usage_error(
    quire: Quire, fake_generation: FakeGeneration, tmp_path: Path
) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    trace = ("--dataset", "burstgpt", "--dataset-path", str(path))
    result = quire("bench", "serve", "--address", fake_generation.address, *trace)
    assert result.exit_code == 2
    assert "has 2 requests of at most 512 tokens; 102 are needed" in " ".join(result.stderr.split())


def test_burstgpt_is_read_by_the_names_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    requests = read_burstgpt(path)
    assert [request[:3] for request in requests] == [(45.0, 20, 5), (46.0, 40, 6)]
    path.write_text(BURSTGPT.replace("Request tokens", "Tokens"))
    with pytest.raises(ValueError, match=r"burst.csv:2: must have Timestamp, Request tokens"):
        read_burstgpt(path)
    for wrong in ("nan,b,3,ChatGPT,20,5", "48,b,3,ChatGPT,-20,5"):
        path.write_text(BURSTGPT + wrong)
        with pytest.raises(ValueError, match=r"burst.csv:5: .* (not finite|negative)"):
            read_burstgpt(path)


def test_sharegpt_asks_the_first_question_of_each_conversation(
    bench: Any, fake_generation: FakeGeneration, tmp_path: Path
) -> None:
    path = tmp_path / "chats.json"
    turns = [("gpt", "hello"), ("human", "what is it?"), ("gpt", "a long reply"), ("human", "and now?")]
    chats = [[{"from": who, "value": text} for who, text in turns[first:]] for first in (0, 1, 2, 3)]
    path.write_text(json.dumps([{"id": "c", "conversations": each} for each in chats]))
    assert read_sharegpt(path) == [("what is it?", "a long reply")] * 2
    bench("--dataset", "sharegpt", "--dataset-path", str(path), "--num-requests", "2")
    assert [sent.text for sent in fake_generation.requests] == ["what is it?"] * 2
    assert {sent.stopping.max_tokens for sent in fake_generation.requests} == {len("a long reply")}
    path.write_text("{}")
    assert read_sharegpt(path) == []
    numbers = [{"from": who, "value": 5} for who in ("human", "gpt")]
    for wrong in ('["text"]', "[" * 100_000, json.dumps([{"conversations": numbers}])):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="must be a list of objects with conversations"):
            read_sharegpt(path)


def test_a_step_of_an_agent_repeats_all_before_it(bench: Any, fake_generation: FakeGeneration) -> None:
    load = ("--num-requests", "12", "--concurrency", "1", "--output-len", "5", "--seed", "1")
    figures = bench("--dataset", "agents", *load, "--trace-speed", "1000000")
    assert figures["num_requests"] == 12
    prompts = [list(sent.token_ids.ids) for sent in fake_generation.requests]
    continued = [(before, after) for before, after in pairwise(prompts) if after[: len(before)] == before]
    assert continued
    answers = {tuple(after[len(before) :][:3]) for before, after in continued}
    assert answers == {(0, 1, 2)}
    assert all(len(prompt) + 5 <= 512 for prompt in prompts)


async def test_turns_after_a_failed_one_count_as_failures(fake_generation: FakeGeneration) -> None:
    fake_generation.errors = [InvalidArgument("text", "is bad")]
    session = BenchRequest([1], {}, later_turns=(Turn(0.0, [2]), Turn(0.0, [3])))
    records: list[RequestRecord] = []
    async with AsyncClient(fake_generation.address) as client:
        await send_session(client, session, 0.0, records.append)
    assert [record.status for record in records] == ["INVALID_ARGUMENT", NOT_SENT, NOT_SENT]


def test_agents_have_the_published_medians() -> None:
    model = ModelInfo("demo", 10**9, 256, (0, 7), 16, 1, 1)
    config = BenchConfig(dataset=Dataset.AGENTS, num_requests=5_000, num_warmups=0)
    sessions = agent_requests(config, model)
    turns = [turn for session in sessions for turn in session.later_turns]
    assert len(sessions) + len(turns) == 5_000
    assert median(len(turn.token_ids) for turn in turns) == pytest.approx(714, rel=0.1)
    assert 0.3 < median(turn.pause_seconds for turn in turns) < 0.9
    assert 8 < median(1 + len(session.later_turns) for session in sessions) < 24


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    def record(ttft: float, tpot: float, status: str = "OK") -> RequestRecord:
        times = (10 + ttft, 10 + ttft + 4 * tpot)
        return RequestRecord(status, 10.0, times[-1], times, output_tokens=5)

    records = [record(0.1, 0.01), record(0.3, 0.01), record(0.1, 0.06), record(0.1, 0.01, "UNAVAILABLE")]
    summary = summarize(records, 2.0, {"ttft": 200.0, "tpot": 50.0})
    assert (summary.good_requests_per_second, summary.attainment) == (0.5, 0.25)
    assert summarize(records, 2.0, {"ttft": 200.0}).attainment == 0.5
    assert summarize(records, 2.0).attainment is None


async def test_more_concurrency_than_requests_delays_none_of_them() -> None:
    num_tasks = []

    async def send(request: BenchRequest, due_seconds: float) -> None:
        num_tasks.append(len(asyncio.all_tasks()))

    await closed_loop([BenchRequest("hello", {})] * 2, 1000, send)
    assert num_tasks[0] == 3


def test_two_routers_get_the_same_requests_in_turns(bench: Any, fake_generation: FakeGeneration) -> None:
    load = ("--num-requests", "10", "--concurrency", "1", "--input-len", "16", "--rounds", "2")
    figures = bench(*load, "--compare", fake_generation.address, "--goodput", "ttft:60000")
    assert figures["num_requests"] == figures["compared"]["num_requests"] == 10
    assert figures["attainment"] == figures["compared"]["attainment"] == 1.0
    prompts = [tuple(sent.token_ids.ids) for sent in fake_generation.requests]
    assert prompts[:5] == prompts[5:10]
    assert prompts[10:15] == prompts[15:]
    assert len({*prompts}) == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset": Dataset.MOONCAKE}, "mooncake needs --dataset-path"),
        ({"dataset_path": Path("x")}, "--dataset-path goes with"),
        ({"trace_speed": 1.0}, "needs a dataset with times"),
        ({"goodput": ["ttft"]}, "must look like ttft:500; got ttft"),
        ({"goodput": ["ttft:nan"]}, "above 0; got ttft:nan"),
        ({"goodput": ["speed:3"]}, "goodput limits are of ttft, tpot, e2el; got speed"),
        ({**TRACE, "trace_speed": 1.0, "rate": 1.0}, "both say"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**settings)
