"""A model on several ranks gives the same bits as on one, and no process outlives a failure."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.benchmarks.harness.random_adapters import make_adapter
from quire.engine.config import MAX_RANKS
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.collectives import RanksError
from quire.engine.ranks import ranks as ranks_module
from quire.engine.ranks.messages import Header, Kind
from quire.engine.ranks.settings import check_device
from quire.engine.scheduling.swapping import SwapCost
from quire.engine.weights.adapters import UnsupportedAdapterError
from quire.kernels.cpu import exchange
from quire.llm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.llm.config import LLMConfig
from quire.settings.setting import SettingError
from tests.testing.processes import have_ended
from tests.testing.until import until

pytestmark = pytest.mark.slow

_SIZES = {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
_PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150, 77)]
_PARAMS = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    """Return a function that makes a tiny model of an architecture, once for each of its arguments."""
    return lambda architecture, **sizes: tiny_model(architecture, **{**_SIZES, **sizes})


def start(folder: Path, num_ranks: int, dtype: Any = "float32", **settings: Any) -> LLM:
    return LLM(
        str(folder), dtype=dtype, num_blocks=128, threads=1, tensor_parallel_size=num_ranks, **settings
    )


def process_ids(llm: LLM) -> list[int]:
    assert llm._ranks is not None
    return llm._ranks.process_ids


def description(llm: LLM) -> tuple[Any, ...]:
    """Return what workers that exchange blocks have in common, and whether no module computes a part."""
    model = llm.engine.model
    is_one_program = model.recipe is not None and not model.recipe.has_modules
    return model.digest, model.arithmetic, llm.engine.memory.shape, is_one_program


def answers(llm: LLM, adapter: str = "") -> list[Any]:
    """Return all tokens, and the exact logprobs of the best ones."""
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs)
        for output in llm.generate(_PROMPTS, _PARAMS, use_tqdm=False, model=adapter)
    ]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("architecture", "overrides", "dtype", "num_ranks"),
    [
        ("llama", {}, "float32", 4),
        ("qwen2", {"tie_word_embeddings": True}, "bfloat16", 2),
        ("gemma2", {}, "float32", 3),
        # Without a pad token, whose row transformers clears when it loads a Youtu itself.
        ("youtu", {"num_key_value_heads": 8, "head_dim": 16, "pad_token_id": None}, "float32", 2),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(
    model: Callable[..., Path], architecture: str, overrides: dict[str, Any], dtype: str, num_ranks: int
) -> None:
    """Where 3 do not divide the 8 heads, ranks have unequal parts and send sums of several pieces.

    Workers with different numbers of ranks exchange blocks, so they describe these alike.
    """
    folder = model(architecture, **overrides)
    with start(folder, 1, dtype) as llm:
        expected = answers(llm)
        described = description(llm)
    with start(folder, num_ranks, dtype) as llm:
        assert description(llm) == described
        assert answers(llm) == expected
        others = process_ids(llm)
    assert len(others) == num_ranks - 1
    assert have_ended(others)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("architecture", "dtype", "num_ranks"), [("llama", "float32", 3), ("gemma2", "bfloat16", 2)]
)
def test_adapters_give_the_same_bits_on_ranks(
    model: Callable[..., Path], tmp_path: Path, architecture: str, dtype: str, num_ranks: int
) -> None:
    """Steps have rows of two adapters and of none, also some that compute no logits."""
    folder, names = model(architecture), ("one", "", "two", "one", "", "two", "two", "one")
    lora = {
        name: str(make_adapter(tmp_path / name, folder, seed=seed, rank=4 + 8 * seed, size=0.3))
        for seed, name in enumerate(("one", "two"))
    }
    answered = []
    for size in (1, num_ranks):
        with start(folder, size, dtype, max_num_batched_tokens=64, lora=lora) as llm:
            outputs = llm.generate(_PROMPTS * 2, _PARAMS, use_tqdm=False, model=names)
            answered.append([(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs])
    assert answered[0] == answered[1]
    assert answered[0][0] != answered[0][4]


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_load_and_drop_adapters_between_steps(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_adapter(tmp_path / "adapter", model("llama"), size=0.3))
    with start(model("llama"), 2, lora={"first": path}) as llm:
        assert llm._ranks is not None
        sent: list[Header] = []
        send = llm._ranks.send

        def record(header: Header, *files: Any) -> None:
            sent.append(header)
            send(header, *files)

        monkeypatch.setattr(llm._ranks, "send", record)
        expected = answers(llm, "first")
        first = llm._adapters["first"].address
        llm.remove_adapter("first")
        llm.add_adapter("second", path)
        second = llm._adapters["second"].address
        assert answers(llm, "second") == expected != answers(llm)
        llm.add_adapter("second", str(make_adapter(tmp_path / "other", model("llama"), seed=1, size=0.3)))
        assert answers(llm, "second") != expected
        gc.collect()
        dropped = [header.numbers for header in sent if header.kind == Kind.DROP_ADAPTER]
        assert dropped == [(first,), (second,)]


@pytest.mark.usefixtures("forked_ranks")
def test_an_adapter_that_a_rank_cannot_place_is_refused(
    model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_adapter(tmp_path / "adapter", model("llama"), size=0.3))
    with start(model("llama"), 2) as llm:
        expected = answers(llm)
        with monkeypatch.context() as patch:
            patch.setattr(ranks_module, "weights_file", lambda _: os.memfd_create("empty"))
            with pytest.raises(OSError, match="another rank cannot place it"):
                llm.add_adapter("bad", path)
        llm.add_adapter("good", path)
        assert answers(llm, "good") != expected == answers(llm)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_ends_while_an_adapter_is_loaded_ends_all(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    path = str(make_adapter(tmp_path / "adapter", model("llama")))
    with start(model("llama"), 2) as llm:
        os.kill(process_ids(llm)[0], signal.SIGKILL)
        with pytest.raises(RanksError, match="rank"):
            llm.add_adapter("late", path)


@pytest.mark.usefixtures("forked_ranks")
def test_an_adapter_with_more_inputs_than_ranks_gather_is_refused(
    model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = model("llama", intermediate_size=1024)
    path = str(make_adapter(tmp_path / "adapter", folder, targets=("down_proj",)))
    with (
        start(folder, 2) as llm,
        pytest.raises(UnsupportedAdapterError, match=r"has 1024 inputs, and 2 ranks gather at most 512"),
    ):
        llm.add_adapter("wide", path)


@pytest.mark.usefixtures("forked_ranks")
def test_blocks_are_moved_for_all_ranks(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that share a partial block copy it, and preempted requests are swapped out and in."""
    folder = model("llama")
    params = SamplingParams(n=3, max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    prompts = [list(range(5, 5 + length)) for length in (27, 42, 61)]
    results = []
    monkeypatch.setattr(SwapCost, "prefers_swap", lambda *_, **__: True)
    for num_ranks in (1, 2):
        with LLM(
            str(folder), dtype="float32", num_blocks=24, threads=1, tensor_parallel_size=num_ranks
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats().num_swapped > 0
            results.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert results[0] == results[1]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_in_a_step_ends_all(
    model: Callable[..., Path], sent: signal.Signals
) -> None:
    with start(model("llama"), 2) as llm:
        others = process_ids(llm)
        timer = Timer(0.3, os.kill, (others[0], sent))
        timer.start()
        began_at = time.monotonic()
        with pytest.raises(RanksError, match="rank 1 has"):
            while time.monotonic() - began_at < 60:
                answers(llm)
        timer.join()
        with pytest.raises(RanksError):
            answers(llm)
    assert have_ended(others)


def test_a_rank_that_raises_in_a_step_ends_all(
    model: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with start(model("llama"), 2) as llm:
        others = process_ids(llm)
        assert llm._ranks is not None
        llm._ranks.send(Header(Kind.STEP, (1 << 40, 0, 0, 0, 0, 0, 0)))
        assert "code 1" in llm._ranks.failure.result(10)
        with pytest.raises(RanksError, match="rank 1 has ended with code 1"):
            answers(llm)
    assert have_ended(others)
    assert "Traceback" in capfd.readouterr().err


def test_a_rank_that_dies_while_it_loads_ends_all(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start_rank = ranks_module._start

    def start_and_kill(settings: Any) -> Any:
        process = start_rank(settings)
        started.append(process.pid)
        Timer(0.5, process.kill).start()
        return process

    monkeypatch.setattr(ranks_module, "_start", start_and_kill)
    with pytest.raises(RanksError, match="rank 1 has ended with code -9"):
        start(model("llama"), 2)
    assert started
    assert have_ended(started)


def test_quantized_weights_are_not_divided() -> None:
    with pytest.raises(ValueError, match="leave weight_dtype at auto, or tensor_parallel_size at 1"):
        LLMConfig(tensor_parallel_size=2, weight_dtype="int8")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        # Kernels of four and two heads to a key-value head, which other tests need too.
        ({"kv_cache_dtype": "int8"}, {"num_attention_heads": 4, "num_key_value_heads": 1}),
        ({"speculation": "ngram", "max_num_batched_tokens": 16, "max_num_seqs": 8}, {}),
        ({"speculation": "draft"}, {}),
    ],
    ids=["int8 with a head on both ranks", "ngram", "draft"],
)
def test_other_settings_give_the_same_bits_on_ranks(
    model: Callable[..., Path], settings: dict[str, Any], heads: dict[str, int]
) -> None:
    folder = model("llama", **heads)
    if settings.get("speculation") == "draft":
        settings = {**settings, "speculation": str(folder)}
    answered = []
    for num_ranks in (1, 2):
        with start(folder, num_ranks, **settings) as llm:
            answered.append(answers(llm))
    assert answered[0] == answered[1]


@pytest.mark.usefixtures("forked_ranks")
def test_requests_of_all_kinds_give_the_same_answers_on_ranks(model: Callable[..., Path]) -> None:
    """Prompts are computed in chunks, so their logprobs come from several steps."""
    beams = BeamSearchParams(beam_width=4, max_tokens=20)
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    form = StructuredOutputsParams(regex="[a-f]{4,30}!")
    formed = SamplingParams(max_tokens=40, structured_outputs=form, **sampled)
    bounded = SamplingParams(max_tokens=24, kv_budget_tokens=64, ignore_eos=True, **sampled)
    scored = SamplingParams(max_tokens=2, prompt_logprobs=1, temperature=0.0)
    answered = []
    for num_ranks in (1, 3):
        with start(model("llama"), num_ranks, max_num_batched_tokens=64, max_num_seqs=4) as llm:
            searched = llm.beam_search(_PROMPTS, beams, use_tqdm=False)
            texts, budgets, scores = (
                llm.generate(_PROMPTS, params, use_tqdm=False) for params in (formed, bounded, scored)
            )
        assert all(re.fullmatch("[a-f]{4,30}!", each.outputs[0].text) for each in texts)
        assert any(each.prompt_logprobs for each in scores)
        answered.append(
            [
                [
                    [(each.token_ids, each.cumulative_logprob) for each in output.outputs]
                    for output in searched
                ],
                [each.outputs[0].token_ids for each in (*texts, *budgets)],
                [each.prompt_logprobs for each in scores],
            ]
        )
    assert answered[0] == answered[1]


def test_there_are_no_more_ranks_than_the_kernels_take() -> None:
    with pytest.raises(ValueError, match=f"from 1 to {exchange.MOST_RANKS}"):
        LLMConfig(tensor_parallel_size=MAX_RANKS + 1)


def test_ranks_do_not_run_on_a_gpu() -> None:
    with pytest.raises(SettingError, match="tensor_parallel_size 2 runs on CPUs only"):
        check_device(LLMConfig(tensor_parallel_size=2), torch.device("cuda"))


def test_a_checkpoint_with_other_names_is_refused(model: Callable[..., Path], tmp_path: Path) -> None:
    """No rule of transformers makes a parameter of this tensor."""
    folder = shutil.copytree(model("llama"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.other.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError, match=r"no counterpart: .*\.other\.weight, .*\.up_proj\.weight"
    ):
        start(folder, 2)


def test_a_model_that_cannot_be_divided_is_refused(model: Callable[..., Path]) -> None:
    with pytest.raises(SettingError, match="segments"):
        start(model("llama", intermediate_size=96), 2)


def test_a_process_that_cannot_be_started_leaks_no_descriptor(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start_rank = ranks_module._start

    def start_first(settings: Any) -> Any:
        if started:
            raise OSError("no more processes")
        process = start_rank(settings)
        started.append(process.pid)
        return process

    monkeypatch.setattr(ranks_module, "_start", start_first)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no more processes"):
        ranks_module.Ranks(LLMConfig(str(model("llama")), tensor_parallel_size=4), 4)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert have_ended(started)


def test_ranks_end_when_rank_0_is_killed(model: Callable[..., Path]) -> None:
    program = (
        "import sys, time\n"
        "from quire.llm import LLM\n"
        "llm = LLM(sys.argv[1], dtype='float32', num_blocks=64, threads=1, tensor_parallel_size=2)\n"
        "print(*llm._ranks.process_ids, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(model("llama"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        others = [int(each) for each in process.stdout.readline().split()]
        process.kill()
    assert others
    asyncio.run(until(lambda: have_ended(others)))
