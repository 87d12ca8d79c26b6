"""The comparison with other engines, as far as it goes with the engines of the project's own environment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from rich.console import Console

from quire.benchmarks.peers import __main__ as peers
from quire.benchmarks.peers.command_line import names_out_of
from quire.benchmarks.peers.processes import Answer, SideFailedError
from quire.benchmarks.peers.random_llamas import SIZES
from quire.benchmarks.peers.report import Measurement, table
from quire.benchmarks.peers.rounds import rotated, run_rounds, shares_of_first_tokens
from quire.benchmarks.peers.workloads import WORKLOADS, Requests, Workload

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MEASUREMENT = Measurement(
    "7m",
    "float32",
    "mixed",
    {"quire": [100.0, 300.0, 200.0], "vllm": [50.0, 100.0, 400.0]},
    {"vllm": 0.5},
)


class Double:
    """A side that answers token 7 in a tenth of a second for each token, or fails from a call on."""

    def __init__(self, fails_at: int = 1000) -> None:
        self.received: list[Requests] = []
        self._fails_at = fails_at

    def generate(self, requests: Requests) -> Answer:
        self.received.append(requests)
        if len(self.received) > self._fails_at:
            raise SideFailedError("out of memory")
        return Answer(0.1 * sum(requests.max_tokens), [[7] * most for most in requests.max_tokens])


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_requests_of_a_workload(workload: Workload) -> None:
    first, second = workload.requests(4096, seed=1), workload.requests(4096, seed=2)
    assert len(first.prompts) == len(first.max_tokens) == workload.num_requests
    assert first.max_tokens == second.max_tokens
    assert [len(prompt) for prompt in first.prompts] == [len(prompt) for prompt in second.prompts]
    assert not {tuple(prompt[:8]) for prompt in first.prompts} & {
        tuple(prompt[:8]) for prompt in second.prompts
    }
    prefixes = {tuple(prompt[: workload.prefix_tokens]) for prompt in first.prompts}
    assert len(prefixes) == 1
    longest = max(len(p) + most for p, most in zip(first.prompts, first.max_tokens, strict=True))
    assert longest <= workload.max_model_len


def test_which_tokens_a_workload_counts() -> None:
    requests = Requests([[1, 2, 3], [4]], [10, 20])
    assert WORKLOADS["mixed"].num_tokens(requests) == 30
    assert WORKLOADS["prefill"].num_tokens(requests) == 4


def test_sides_take_turns() -> None:
    orders = [rotated(["a", "b", "c"], index) for index in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_rounds() -> None:
    sides = {"quire": Double(), "vllm": Double(fails_at=2)}
    progress: list[str] = []
    rounds = run_rounds(Workload("short", 2, (3, 5), (2, 4)), sides, 320, 3, progress.append)
    assert rounds.rates == {"quire": [pytest.approx(10.0)] * 3}
    assert rounds.failures == {"vllm": "out of memory"}
    assert rounds.first_tokens == {}
    assert sides["quire"].received[1] == sides["vllm"].received[1] != sides["quire"].received[2]
    assert progress[0] == "short, warm-up: quire 10 tokens/s"


def test_shares_of_first_tokens() -> None:
    answers = {"quire": [[1, 2], [3, 4]], "vllm": [[1, 9], [5, 4]]}
    assert shares_of_first_tokens(answers) == {"vllm": 0.5}
    assert shares_of_first_tokens({"vllm": [[1]]}) == {}


def test_ratios_are_of_the_same_round() -> None:
    assert MEASUREMENT.medians() == {"quire": 200.0, "vllm": 100.0}
    assert MEASUREMENT.ratios() == {"vllm": 2.0}
    assert MEASUREMENT._replace(rates={"vllm": [1.0]}).ratios() == {}


def test_table_has_empty_cells_for_a_side_that_did_not_run() -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table("7m, float32", [MEASUREMENT], ["quire", "vllm", "llama.cpp"]))
    cells = [cell.strip() for cell in capture.get().splitlines()[-2].strip("│ ").split("│")]
    assert cells == ["mixed", "200", "100", "", "2.00", "", "vllm 50%"]


def test_options() -> None:
    values = peers.parse(["--workloads", "prefill,mixed", "--sides", "quire"])
    assert (values.workloads, values.sides, values.models) == (
        ["prefill", "mixed"],
        ["quire"],
        ["7m", "100m"],
    )
    with pytest.raises(argparse.ArgumentTypeError, match="tiny is none of 7m, 100m"):
        names_out_of(["7m", "100m"])("7m,tiny")


def test_quire_beside_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    workloads = [Workload("batch", 4, (5, 20), (2, 6)), Workload("prefill", 1, (32, 32), (1, 1), 0, "prompt")]
    sides = ["quire", "vllm", "transformers"]
    peers.compare_all(peers.Options(sides, ["tiny"], ["float32"], workloads, 1, 1, tmp_path))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["versions"]) == {"quire", "transformers"}
    assert result["failures"] == [
        "vllm cannot run tiny in float32 here: it is not installed: run with --install first"
    ]
    assert [row["workload"] for row in result["results"]] == ["batch", "prefill"]
    for row in result["results"]:
        assert row["first_tokens"] == {"transformers": 1.0}
        assert row["ratios"].keys() == {"transformers"}
