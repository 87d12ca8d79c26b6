"""The benchmark of the token path, on a real stack: what it prints, and what a stream costs at least."""

from __future__ import annotations

import json

import pytest

from quire.benchmarks import token_path


def test_both_apis_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    token_path.main(["--clients", "2", "--tokens", "20", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "router" in printed
    rows = json.loads(printed.splitlines()[-1])["rows"]
    apis = ["gRPC", "gRPC, divided", "HTTP, completion", "HTTP, chat"]
    assert [(row["api"], row["clients"]) for row in rows] == [(api, 2) for api in apis]
    for row in rows:
        # The last message of an answer may have no token.
        assert 2 / 20 <= row["messages_per_token"] <= 21 / 20
        assert "tokens_per_second" in row
        # With one round, the medians are its figures.
        per_token = row["router_microseconds_per_message"] * row["messages_per_token"]
        assert row["router_microseconds"] == pytest.approx(per_token)
    assert "bare_microseconds" in rows[0]
