"""Requests with different adapters, and without one, share steps; each gets the bits that it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.benchmarks.harness.random_adapters import make_adapter
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence, TokenLogprobs
from quire.engine.speculation.draft_proposer import DraftProposer
from quire.engine.speculation.speculator import Speculator
from quire.engine.weights.adapters import UnsupportedAdapterError, load_adapter
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kernels.metadata import Adapter
from quire.kvindex.block_hash import CacheScope, root_hash
from tests.testing.adapters import logprobs_by_formula
from tests.testing.tiny_engine import (
    CPU,
    make_engine,
    make_prompt,
    make_request,
    output,
    run,
    run_in_order,
    updates_of,
)

NUM_PROMPT, NUM_NEW = 90, 40


def with_adapter(request: Sequence, adapter: Adapter | None) -> Sequence:
    """Return a request that an adapter computes, in the scope of its own."""
    scope = CacheScope(adapter=adapter.digest if adapter else "")
    return replace(request, adapter=adapter, root_hash=root_hash(b"layout", b"", scope))


def prompt_logprobs(model: LoadedModel, adapter: Adapter | None, prompt: list[int]) -> list[TokenLogprobs]:
    request = make_request("scored", prompt, max_tokens=1, num_prompt_logprobs=20)
    request = with_adapter(request, adapter)
    run(make_engine(model), request)
    return request.prompt_logprobs


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"rank": 8}),
        ("llama", {"rank": 5, "use_rslora": True}),
        ("llama", {"rank": 24, "targets": ("q_proj", "down_proj")}),
        ("phi3", {"rank": 16}),
        ("gpt2", {"rank": 4, "fan_in_fan_out": True}),
        ("opt", {"rank": 8}),
        ("gemma2", {"rank": 8}),
        ("qwen3", {"rank": 64, "lora_alpha": 3}),
    ],
)
def test_logprobs_are_those_of_the_formula(
    tiny_model: Callable[[str], Path], tmp_path: Path, architecture: str, config: dict[str, object]
) -> None:
    folder, prompt = tiny_model(architecture), make_prompt(40)
    path = make_adapter(tmp_path / "adapter", folder, **config)  # type: ignore[arg-type]
    model = load_model(str(folder), "float32", CPU)
    adapter = load_adapter(str(path), model)
    for each, its_path in ((adapter, path), (None, None)):
        expected = logprobs_by_formula(folder, its_path, prompt)
        found = prompt_logprobs(model, each, prompt)
        for position, (token_id, logprobs) in enumerate(zip(prompt[1:], found, strict=True)):
            assert logprobs.logprob == pytest.approx(expected[position, token_id].item(), abs=2e-4)
    difference = logprobs_by_formula(folder, path, prompt) - logprobs_by_formula(folder, None, prompt)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize(
    ("architecture", "dtype", "weight_dtype"),
    [
        ("llama", "float32", "auto"),
        ("llama", "float16", "auto"),
        ("phi3", "bfloat16", "auto"),
        ("llama", "float32", "w8a8"),
        ("llama", "float32", "int4"),
    ],
)
def test_bits_depend_neither_on_the_batch_nor_on_chunks(
    tiny_model: Callable[[str], Path], tmp_path: Path, architecture: str, dtype: str, weight_dtype: str
) -> None:
    folder = tiny_model(architecture)
    model = load_model(str(folder), dtype, CPU, weight_dtype)
    paths = [
        make_adapter(tmp_path / str(seed), folder, seed=seed, rank=rank)
        for seed, rank in enumerate((4, 8, 24))
    ]
    adapters = [*(load_adapter(str(path), model) for path in paths), None]
    alone = [_decoded(model, adapter, 512, []) for adapter in adapters]
    assert len({repr(each) for each in alone}) == len(adapters)
    for budget in (16, 37, 512):
        for adapter, expected in zip(adapters, alone, strict=True):
            assert _decoded(model, adapter, budget, adapters) == expected, budget


def _decoded(
    model: LoadedModel, adapter: Adapter | None, budget: int, others: list[Adapter | None]
) -> list[TokenLogprobs | None]:
    """Return the logprobs of an answer, computed together with requests that use other adapters."""
    engine = make_engine(model, num_blocks=256, max_num_seqs=16, max_num_batched_tokens=budget)
    for index, each in enumerate(2 * others):
        prompt = Random(index).choices(range(2, 320), k=7 + index)
        engine.add_request(with_adapter(make_request(f"other-{index}", prompt), each))
    prompt = make_prompt(NUM_PROMPT)
    request = make_request("sampled", prompt, temperature=1.0, seed=1, max_tokens=NUM_NEW, num_logprobs=2)
    request = with_adapter(request, adapter)
    logprobs: list[TokenLogprobs | None] = []
    for update in updates_of(engine, request):
        if update.sequence is request:
            logprobs += [token.logprobs for token in update.tokens]
    return logprobs


@pytest.fixture
def llama(tiny_model: Callable[[str], Path]) -> LoadedModel:
    return load_model(str(tiny_model("llama")), "float32", CPU)


@pytest.fixture
def adapters(llama: LoadedModel, tmp_path: Path) -> list[Adapter]:
    paths = [make_adapter(tmp_path / str(seed), llama.folder, seed=seed, size=0.3) for seed in range(2)]
    return [load_adapter(str(path), llama) for path in paths]


def test_no_request_gets_the_blocks_of_another_adapter(llama: LoadedModel, adapters: list[Adapter]) -> None:
    users = [*adapters, None]
    prompt = make_prompt(100)
    expected = [
        run_in_order(make_engine(llama), with_adapter(make_request("a", prompt), each)) for each in users
    ]
    assert len({repr(each) for each in expected}) == len(users)
    engine = make_engine(llama)
    for turn in range(2):
        for each, tokens in zip(users, expected, strict=True):
            request = with_adapter(make_request(f"{turn}", prompt), each)
            assert run_in_order(engine, request) == tokens
            assert request.num_cached_tokens // 16 == (6 if turn else 0)


@pytest.mark.parametrize("prefers_swap", [True, False])
def test_preemption_keeps_the_adapter(
    llama: LoadedModel, adapters: list[Adapter], prefers_swap: bool
) -> None:
    def requests() -> list[Sequence]:
        users = [adapters[0], None, adapters[1], adapters[0]]
        return [
            with_adapter(make_request(str(index), make_prompt(60, index)), each)
            for index, each in enumerate(users)
        ]

    expected = run_in_order(make_engine(llama), *requests())
    small = make_engine(llama, num_blocks=16, num_swap_blocks=32, prefers_swap=prefers_swap)
    assert run_in_order(small, *requests()) == expected
    assert small.preemption.num_preempted


def test_samples_keep_the_adapter(llama: LoadedModel, adapters: list[Adapter]) -> None:
    params = {"temperature": 1.0, "seed": 5}
    request = with_adapter(make_request("all", make_prompt(30), n=3, **params), adapters[0])
    outputs = run(make_engine(llama), request)
    for index in range(3):
        alone = make_request("one", make_prompt(30), temperature=1.0, seed=5 + index)
        assert run_in_order(make_engine(llama), with_adapter(alone, adapters[0])) == [outputs["all", index]]


def test_a_draft_model_runs_without_the_adapter(llama: LoadedModel, adapters: list[Adapter]) -> None:
    def requests() -> list[Sequence]:
        prompts = [make_prompt(30, index) for index in range(3)]
        users = [*adapters, None]
        return [with_adapter(make_request(f"{at}", prompts[at]), users[at]) for at in range(3)]

    memory, limits = KvMemory(llama.kv_shape(16), 64, CPU), SchedulerConfig(16, 16, 128)
    drafter = DraftProposer(llama, memory, limits, llama.eos_token_ids)
    speculator = Speculator(drafter, 3)
    engine = make_engine(llama, speculator=speculator)
    speculated = requests()
    accepted = [update.num_accepted_tokens for update in updates_of(engine, *speculated)]
    assert list(map(output, speculated)) == run_in_order(make_engine(llama), *requests())
    assert sum(accepted) > 20


def test_the_digest_is_that_of_the_weights(llama: LoadedModel, tmp_path: Path) -> None:
    def digest(name: str, **values: object) -> str:
        path = make_adapter(tmp_path / name, llama.folder, **values)  # type: ignore[arg-type]
        return load_adapter(str(path), llama).digest

    first = digest("first")
    assert digest("copy") == first
    others = {digest("seed", seed=1), digest("rank", rank=4), digest("alpha", lora_alpha=1)}
    assert len(others | {first}) == 4


def test_other_weights_in_the_same_folder_do_not_reach_a_running_request(
    llama: LoadedModel, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "adapter", llama.folder, seed=1, size=0.3)
    old = load_adapter(str(path), llama)
    expected = run_in_order(make_engine(llama), with_adapter(make_request("a", make_prompt(30)), old))
    engine = make_engine(llama)
    request = with_adapter(make_request("a", make_prompt(30)), old)
    engine.add_request(request)
    for _ in range(5):
        engine.step()
    del old
    new = load_adapter(str(make_adapter(path, llama.folder, seed=2, size=0.3)), llama)
    assert new.digest != request.adapter.digest  # type: ignore[union-attr]
    later = with_adapter(make_request("b", make_prompt(30)), new)
    assert run_in_order(engine, later) != expected
    assert [request.token_ids[request.num_prompt_tokens :]] == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"bias": "all"}, "bias 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused_by_name(
    llama: LoadedModel, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    path = make_adapter(tmp_path / "adapter", llama.folder, **config)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedAdapterError, match=message):
        load_adapter(str(path), llama)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A is not supported"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head is no linear layer"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", "layers.9"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "lora_magnitude_vector"),
        ("base_model.model.model.layers.0.mlp.experts.0.w1.lora_A.weight", "experts.0.w1"),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    llama: LoadedModel, tmp_path: Path, key: str, message: str
) -> None:
    path = make_adapter(tmp_path / "adapter", llama.folder)
    tensors = load_file(path / "adapter_model.safetensors")
    tensors[key] = torch.zeros(8, 64)
    tensors[key.replace("lora_A.", "lora_B.")] = torch.zeros(320, 8)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedAdapterError, match=message):
        load_adapter(str(path), llama)


def test_an_adapter_of_another_model_is_refused(
    llama: LoadedModel, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "adapter", tiny_model("llama"), rank=8)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors = load_file(path / "adapter_model.safetensors")
    save_file({**tensors, key: tensors[key][:, :32].contiguous()}, path / "adapter_model.safetensors")
    with pytest.raises(UnsupportedAdapterError, match=r"q_proj has lora_A \(8, 32\)"):
        load_adapter(str(path), llama)


def test_a_pattern_of_alpha_applies_to_its_layers(llama: LoadedModel, tmp_path: Path) -> None:
    targets, prompt = ("q_proj",), make_prompt(40)
    plain = make_adapter(tmp_path / "plain", llama.folder, targets=targets, lora_alpha=40)
    pattern = {"layers.*.q_proj": 40}
    path = make_adapter(tmp_path / "pattern", llama.folder, targets=targets, alpha_pattern=pattern)
    adapters = [load_adapter(str(each), llama) for each in (plain, path)]
    assert adapters[0].digest == adapters[1].digest
    first, second = (prompt_logprobs(llama, adapter, prompt) for adapter in adapters)
    assert first == second


@pytest.mark.parametrize("architecture", ["gpt_neox", "mixtral", "youtu"])
def test_a_model_with_modules_or_latents_has_no_adapters(
    tiny_model: Callable[[str], Path], tmp_path: Path, architecture: str
) -> None:
    folder = tiny_model(architecture)
    path = make_adapter(tmp_path / "adapter", folder)
    with pytest.raises(UnsupportedAdapterError, match=f"{architecture} does not"):
        load_adapter(str(path), load_model(str(folder), "float32", CPU))
