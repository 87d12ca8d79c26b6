"""The comparison with other engines, as far as it goes with the engines of the project's own environment."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from quire.benchmarks.harness.program import CannotRunError
from quire.benchmarks.model_sizes import SIZES
from quire.benchmarks.peers import __main__ as peers
from quire.benchmarks.peers import models
from quire.benchmarks.peers.processes import Answer, SideFailedError
from quire.benchmarks.peers.rounds import Comparison, ratios, report_all
from quire.benchmarks.peers.sides.protocol import Dtype
from quire.benchmarks.peers.sides.quire import arithmetic
from quire.benchmarks.peers.workloads import WORKLOADS, Requests, Workload
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.kernels.cpu.products import integer_weight, packed_weight
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16
from quire.kernels.cpu.products.integer_weight import quantize_to_integers
from quire.kernels.cpu.products.packed_weight import PackedWeight
from quire.kernels.cpu.products.packing import pack


class Figures(NamedTuple):
    rate: float
    milliseconds: float


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


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the program with options that it must refuse, and return what it says."""
    with pytest.raises(SystemExit) as raised:
        peers.main(words)
    assert raised.value.code == 2
    return capsys.readouterr().err


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


def test_no_round_of_any_workload_finds_prompts_of_another_in_a_cache() -> None:
    rounds = [workload.requests(4096, seed) for workload in WORKLOADS.values() for seed in range(-1, 5)]
    begins = [{tuple(prompt[:8]) for prompt in requests.prompts} for requests in rounds]
    assert len(set.union(*begins)) == sum(map(len, begins))


def test_which_tokens_a_workload_counts() -> None:
    requests = Requests([[1, 2, 3], [4]], [10, 20])
    assert WORKLOADS["mixed"].num_tokens(requests) == 30
    assert WORKLOADS["prefill"].num_tokens(requests) == 4


def test_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    sides = {"quire": Double(), "vllm": Double(fails_at=2)}
    rows, failures = peers.measure(Workload("short", 2, (3, 5), (2, 4)), sides, 320, 3)
    assert rows == [
        {
            "side": "quire",
            "tokens_per_second": pytest.approx(10.0),
            "ratio": None,
            "first_tokens": None,
            "rounds": [pytest.approx(10.0)] * 3,
        }
    ]
    assert failures == {"vllm": "out of memory"}
    assert sides["quire"].received[1] == sides["vllm"].received[1] != sides["quire"].received[2]
    assert "short, round 0: quire 10 tokens/s" in capsys.readouterr().err


def test_no_round_repeats_the_prompts_of_another() -> None:
    side = Double()
    peers.measure(WORKLOADS["prefill"], {"quire": side}, 320, 3)
    assert len({tuple(requests.prompts[0]) for requests in side.received}) == 4


def test_sides_are_compared_with_quire() -> None:
    rows, _ = peers.measure(WORKLOADS["decode"], {"quire": Double(), "vllm": Double()}, 320, 1)
    assert [row["ratio"] for row in rows] == [None, pytest.approx(1.0)]
    assert [row["first_tokens"] for row in rows] == [None, 1.0]
    rows, _ = peers.measure(WORKLOADS["decode"], {"vllm": Double()}, 320, 1)
    assert [row["ratio"] for row in rows] == [None]


def test_share_of_first_tokens() -> None:
    assert peers.share_of_first_tokens([[1, 9], [5, 4]], own=[[1, 2], [3, 4]]) == 0.5


def test_ratios_are_of_the_same_round() -> None:
    own = [Figures(100.0, 4.0), Figures(300.0, 4.0), Figures(200.0, 4.0)]
    other = [Figures(50.0, 2.0), Figures(100.0, 0.0), Figures(400.0, 1.0)]
    assert ratios(own, other) == Figures(2.0, 2.0)


def test_the_model_of_an_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PEER_SIZES", {**SIZES, "num_hidden_layers": 4})
    path, vocab_size = models.random_model("bailing_hybrid", tmp_path)
    config = json.loads((path / "config.json").read_text())
    assert config["vocab_size"] == vocab_size == 320
    assert config["layer_types"] == ["linear_attention", "full_attention"] * 2
    assert config["mlp_layer_types"] == ["dense", "sparse", "sparse", "sparse"]
    assert (path / "tokenizer.json").exists()
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert models.random_model("bailing_hybrid", tmp_path)[0] == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written


def test_a_model_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--sides", "quire", "--models", "2b", "--folder", str(tmp_path))
    assert "There is no random model 2b" in said


@pytest.mark.slow
def test_quire_beside_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(WORKLOADS, "mixed", Workload("mixed", 4, (5, 20), (2, 6)))
    monkeypatch.setitem(WORKLOADS, "prefill", Workload("prefill", 1, (32, 32), (1, 1), 0, "prompt"))
    words = "--sides quire,vllm,transformers --models tiny --dtypes float32 --workloads mixed,prefill"
    peers.main([*words.split(), "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["versions"]) == {"quire", "transformers"}
    assert result["failures"] == [
        "vllm cannot run tiny in float32 here: it is not installed: run with --install first"
    ]
    assert [(row["workload"], row["side"]) for row in result["rows"]] == [
        (workload, side) for workload in ("mixed", "prefill") for side in ("quire", "transformers")
    ]
    assert [row["first_tokens"] for row in result["rows"]] == [None, 1.0, None, 1.0]
    assert all(row["ratio"] for row in result["rows"] if row["side"] == "transformers")


def test_without_any_side_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--sides", "vllm", "--models", "tiny", "--dtypes", "float32"
    assert "run with --install first" in refusal(capsys, *options, "--folder", str(tmp_path))


def test_a_failed_installation_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "file"
    folder.touch()
    said = refusal(capsys, "--install", "--sides", "vllm", "--folder", str(folder))
    assert "vllm could not be installed" in said


def test_no_workload_runs_when_all_sides_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "start", lambda *_: nullcontext(Double(fails_at=0)))
    monkeypatch.setattr(peers, "random_model", lambda *_: (tmp_path, 320))
    options = peers.Options(sides=("quire",), workloads=("one-stream", "prefill"))
    found = peers.compare(options, "7m", "float32")
    assert (found.rows, found.failures) == (
        [],
        ["quire cannot run one-stream of 7m in float32 here: out of memory"],
    )


def test_a_model_that_cannot_run_loses_no_results_of_others() -> None:
    def compare(model: str, dtype: Dtype) -> Comparison:
        if model == "2b":
            raise CannotRunError("There is no random model 2b.")
        return Comparison([{"workload": "mixed"}], [], {}, {})

    report = report_all(["7m", "2b"], ["float32"], compare, {"workload": "{workload}"})
    assert report.results["rows"] == [{"workload": "mixed"}]
    assert report.results["failures"] == ["There is no random model 2b."]


def test_a_gguf_file_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.gguf"
    assert "a.gguf" in refusal(capsys, "--sides", "quire", "--gguf", str(path), "--folder", str(tmp_path))


def test_the_instructions_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(64, 64)
    tiles: Any = pack(weight.bfloat16(), AMX_BFLOAT16)
    integers = quantize_to_integers(weight)
    # Packing would compile tiles, and try them.
    for module in (packed_weight, integer_weight):
        monkeypatch.setattr(module, "may_use_tiles", lambda *_: True)

    def named(packed: PackedWeight) -> str:
        module = torch.nn.Sequential(PackedLinear(packed))
        llm: Any = SimpleNamespace(engine=SimpleNamespace(model=SimpleNamespace(module=module)))
        return arithmetic(llm)

    assert named(pack(weight)) == "float32 products"
    assert named(replace(tiles, by_tiles=True)) == "tdpbf16ps"
    assert named(replace(tiles, by_tiles=False)) == "float32 products in the order of tdpbf16ps"
    assert named(replace(integers, by_tiles=True)) == "tdpbusd"
    assert named(replace(integers, by_tiles=False)) in ("vpdpbusd", "vpmaddwd", "vpmulld")
