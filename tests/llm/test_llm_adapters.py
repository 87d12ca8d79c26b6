"""Adapters of LLM: each prompt gets the bits of its own adapter, and other names are refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.benchmarks.harness.random_adapters import make_adapter
from quire.engine.weights.adapters import UnsupportedAdapterError, load_adapter
from quire.engine.weights.loader import load_model
from quire.kvindex.block_hash import CacheScope, root_hash
from quire.llm import LLM, BeamSearchParams, SamplingParams
from tests.testing.tiny_engine import CPU, make_engine, make_prompt, make_request, run_in_order

NUM_NEW = 30
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
NAMES = ("one", "", "two", "one")


@pytest.fixture(scope="module")
def paths(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("adapters")
    return {
        name: str(make_adapter(target / name, tiny_folder, seed=seed, size=0.3))
        for seed, name in enumerate(("one", "two"))
    }


@pytest.fixture
def llm(tiny_folder: Path, paths: dict[str, str]) -> Iterator[LLM]:
    with LLM(str(tiny_folder), num_blocks=256, max_model_len=400, lora=paths) as llm:
        yield llm
        llm.engine.check_conservation()


def expected(folder: Path, path: str, prompt: list[int]) -> list[int]:
    """Return the tokens of an engine that computes only this prompt, as a worker does over gRPC."""
    model = load_model(str(folder), "float32", CPU)
    request = make_request("a", prompt, max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    if path:
        request.adapter = load_adapter(path, model)
        request.root_hash = root_hash(b"", b"", CacheScope(adapter=request.adapter.digest))
    return run_in_order(make_engine(model), request)[0]


def tokens(llm: LLM, prompts: list[list[int]], model: str | tuple[str, ...]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, model=model)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_of_several_adapters_share_steps(llm: LLM, tiny_folder: Path, paths: dict[str, str]) -> None:
    prompt = make_prompt(70)
    answers = [expected(tiny_folder, paths.get(name, ""), prompt) for name in NAMES]
    assert len(set(map(tuple, answers))) == 3
    for _ in range(2):
        assert tokens(llm, [prompt] * len(NAMES), NAMES) == answers
    for name, answer in zip(NAMES, answers, strict=True):
        assert tokens(llm, [prompt], name) == [answer]


def test_a_cached_prefix_is_used_only_with_its_own_adapter(llm: LLM) -> None:
    prompt = make_prompt(70, seed=1)
    for num_cached in (0, 69):
        for name in ("one", "two", ""):
            [output] = llm.generate(prompt, GREEDY, use_tqdm=False, model=name)
            assert output.num_cached_tokens == num_cached


def test_a_beam_search_with_an_adapter(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    prompt = make_prompt(20)
    own, other = llm.beam_search([prompt] * 2, params, use_tqdm=False, model=("one", "two"))
    assert own.outputs[0].token_ids != other.outputs[0].token_ids
    [alone] = llm.beam_search(prompt, params, use_tqdm=False, model="one")
    assert alone.outputs[0].token_ids == own.outputs[0].token_ids


def test_a_name_that_is_unknown_or_missing_is_refused_before_any_prompt_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"which has 'one', 'two'; got 'three'"):
        tokens(llm, [make_prompt(20)] * 2, ("one", "three"))
    with pytest.raises(ValueError, match="there are 2 prompts, but models for 1"):
        tokens(llm, [make_prompt(20)] * 2, ("one",))
    assert llm.stats().num_requests == 0


def test_without_adapters_every_name_is_refused(tiny_folder: Path) -> None:
    with (
        LLM(str(tiny_folder), num_blocks=64, max_model_len=100) as llm,
        pytest.raises(ValueError, match="which has none; got 'one'"),
    ):
        tokens(llm, [make_prompt(20)], "one")


def test_an_adapter_that_cannot_be_loaded_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    bad = make_adapter(tmp_path / "bad", tiny_folder, use_dora=True)
    with pytest.raises(
        UnsupportedAdapterError, match=f"the adapter sql from {bad}: use_dora is not supported"
    ):
        LLM(str(tiny_folder), num_blocks=64, max_model_len=100, lora={"sql": str(bad)})
    with pytest.raises(ValueError, match="each adapter must have a name"):
        LLM(str(tiny_folder), num_blocks=64, max_model_len=100, lora={"": str(bad)})


def test_adapters_are_added_replaced_and_removed_between_calls(
    llm: LLM, tiny_folder: Path, paths: dict[str, str]
) -> None:
    prompt = make_prompt(70, seed=2)
    one, two = (expected(tiny_folder, paths[name], prompt) for name in ("one", "two"))
    llm.add_adapter("three", paths["one"])
    assert tokens(llm, [prompt] * 2, ("three", "one")) == [one, one]
    llm.add_adapter("three", paths["two"])
    assert tokens(llm, [prompt], "three") == [two]
    llm.remove_adapter("three")
    with pytest.raises(ValueError, match=r"model must be .*, which has 'one', 'two'; got 'three'"):
        tokens(llm, [prompt], "three")
    with pytest.raises(ValueError, match=r"name must be .*, which has 'one', 'two'; got 'three'"):
        llm.remove_adapter("three")


def test_a_request_keeps_the_weights_with_which_it_began(
    llm: LLM, tiny_folder: Path, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, step, num_steps = make_prompt(70, seed=3), llm.engine.step, 0
    one, two = (expected(tiny_folder, paths[name], prompt) for name in ("one", "two"))
    first = weakref.ref(llm._adapters["one"])

    def step_and_change() -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            llm.remove_adapter("one")
            gc.collect()
        if num_steps == 10:
            llm.add_adapter("one", paths["two"])
        assert first() is not None
        return step()

    monkeypatch.setattr(llm.engine, "step", step_and_change)
    assert tokens(llm, [prompt], "one") == [one]
    assert num_steps > 10
    monkeypatch.undo()
    assert tokens(llm, [prompt], "one") == [two]
    gc.collect()
    assert first() is None


def test_an_adapter_that_cannot_be_added_leaves_the_one_of_its_name(
    llm: LLM, tiny_folder: Path, paths: dict[str, str], tmp_path: Path
) -> None:
    prompt = make_prompt(20, seed=4)
    before = tokens(llm, [prompt], "one")
    bad = make_adapter(tmp_path / "bad", tiny_folder, use_dora=True)
    with pytest.raises(UnsupportedAdapterError, match=f"the adapter one from {bad}: use_dora"):
        llm.add_adapter("one", str(bad))
    with pytest.raises(OSError, match="adapter_config"):
        llm.add_adapter("one", str(tmp_path))
    with pytest.raises(ValueError, match="each adapter must have a name"):
        llm.add_adapter("", paths["two"])
    assert tokens(llm, [prompt], "one") == before
