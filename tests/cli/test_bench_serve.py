"""``quire bench serve`` against a server on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from quire.rpc import errors as service_errors

Quire = Callable[..., Result]


@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "200")])
def test_a_bench_prints_a_table_and_ends_with_json(
    quire: Quire, fake_generation: Any, tmp_path: Path, load: tuple[str, str]
) -> None:
    file = tmp_path / "bench.json"
    result = quire(
        *("bench", "serve", "--address", fake_generation.address, *load, "--num-requests", "10"),
        *("--num-warmups", "2", "--input-len", "32", "--output-len", "5", "--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    assert "Output token throughput" in result.stdout
    line = result.stdout.splitlines()[-1]
    assert file.read_text() == line + "\n"
    figures = json.loads(line)
    assert (figures["num_requests"], figures["num_succeeded"]) == (10, 10)
    assert figures["output_tokens"] == 30
    assert figures["cached_token_ratio"] == 0.8
    assert "p99" in figures["ttft_ms"]
    assert len(fake_generation.requests) == 12
    assert all(len(sent.token_ids.ids) == 32 for sent in fake_generation.requests)
    assert all(sent.stopping.max_tokens == 5 for sent in fake_generation.requests)


def test_failures_are_counted_by_status(quire: Quire, fake_generation: Any) -> None:
    fake_generation.errors = [service_errors.ResourceExhausted("full")] * 3
    result = quire(
        *("bench", "serve", "--address", fake_generation.address, "--num-requests", "8"),
        *("--num-warmups", "0", "--input-len", "8"),
    )
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["failures"] == {"RESOURCE_EXHAUSTED": 3}
    assert figures["num_succeeded"] == 5


def test_no_success_is_a_failure(quire: Quire, fake_generation: Any) -> None:
    fake_generation.errors = [service_errors.ResourceExhausted("full")] * 3
    result = quire(
        *("bench", "serve", "--address", fake_generation.address, "--num-requests", "3"),
        *("--num-warmups", "0", "--input-len", "8"),
    )
    assert json.loads(result.stdout.splitlines()[-1])["num_succeeded"] == 0
    assert result.exit_code == 1
    assert result.stderr.endswith("no request succeeded: RESOURCE_EXHAUSTED 3 times\n")


def test_an_unwritable_output_file_is_reported_before_the_load(
    quire: Quire, fake_generation: Any, tmp_path: Path
) -> None:
    file = str(tmp_path / "missing" / "bench.json")
    result = quire("bench", "serve", "--address", fake_generation.address, "--json", file)
    assert (result.exit_code, fake_generation.requests) == (2, [])
    assert "cannot write" in result.stderr


@pytest.mark.parametrize("columns", ["20", "40"])
def test_the_table_is_not_cut(
    quire: Quire, fake_generation: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = quire(
        *("bench", "serve", "--address", fake_generation.address, "--num-requests", "2"),
        *("--num-warmups", "0", "--input-len", "8"),
    )
    assert "Output token throughput (tok/s)" in result.stdout
    assert "…" not in result.stdout


def test_prompts_that_do_not_fit_are_a_usage_error(quire: Quire, fake_generation: Any) -> None:
    result = quire("bench", "serve", "--address", fake_generation.address, "--input-len", "512")
    assert result.exit_code == 2
    assert "exceed the model's 512 tokens" in result.stderr


def test_the_server_that_does_not_answer_is_named(quire: Quire, fake_generation: Any) -> None:
    result = quire("bench", "serve", "--address", fake_generation.address, "--compare", "127.0.0.1:2")
    assert result.exit_code == 1
    assert "127.0.0.1:2" in result.stderr
    assert fake_generation.address not in result.stderr


@pytest.mark.parametrize("compare", [[], ["--compare", "127.0.0.1:2"]])
def test_no_server_is_an_error(quire: Quire, compare: list[str]) -> None:
    result = quire("bench", "serve", "--address", "127.0.0.1:1", *compare)
    assert result.exit_code == 1
    assert "no server answers" in result.stderr
