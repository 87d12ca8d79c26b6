"""The slices of a checkpoint that a rank loads: buffers come along, and other dtypes are not assumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

from quire.benchmarks.model_survey import RANK_SIZES, make_tiny_model
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers import attention
from quire.engine.weights.checkpoint import Checkpoint
from quire.engine.weights.sliced_weights import load_slices


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[str], PreTrainedModel]:
    """Return a function that saves a tiny model and returns it."""

    def save(name: str) -> PreTrainedModel:
        attention.register()
        model: PreTrainedModel = make_tiny_model(name, RANK_SIZES)
        for _, buffer in model.named_buffers():
            buffer.copy_(torch.rand_like(buffer))
        model.save_pretrained(tmp_path)
        return model

    return save


def test_buffers_of_the_checkpoint_are_loaded(
    saved: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    whole = saved("apertus").state_dict()
    own, *_ = load_slices(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32, 1, 2)
    buffers = {name: buffer for name, buffer in own.named_buffers() if name in whole}
    assert "model.layers.0.mlp.act_fn.beta" in buffers
    assert all(torch.equal(buffer, whole[name]) for name, buffer in buffers.items())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "granitemoe", "gpt_neox"])
def test_parameters_of_other_names_are_loaded(
    saved: Callable[[str], PreTrainedModel], tmp_path: Path, name: str
) -> None:
    """Transformers stacks and renames what is stored; a rank's part is that of the whole."""
    whole = dict(saved(name).named_parameters())
    config = AutoConfig.from_pretrained(tmp_path)
    parts = [load_slices(tmp_path, config, torch.float32, rank, 2)[0] for rank in range(2)]
    for path, parameter in whole.items():
        first, second = (part.get_parameter(path) for part in parts)
        if first.shape == parameter.shape:
            assert torch.equal(first, parameter), path
        else:
            dimension = next(i for i, size in enumerate(first.shape) if size < parameter.shape[i])
            assert torch.equal(torch.cat([first, second], dimension), parameter), path


def test_a_rank_reads_only_its_own_experts(
    saved: Callable[[str], PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("mixtral")
    names = []
    load = Checkpoint._load

    def load_and_note(self: Checkpoint, name: str) -> torch.Tensor:
        names.append(name)
        return load(self, name)

    monkeypatch.setattr(Checkpoint, "_load", load_and_note)
    model, *_ = load_slices(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32, 1, 2)
    num_experts = model.config.num_local_experts
    read = {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}
    assert read == set(range(num_experts // 2, num_experts))


def test_weights_that_stay_in_float32_are_named(
    saved: Callable[[str], PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"input_layernorm"})
    saved("llama")
    config = AutoConfig.from_pretrained(tmp_path)
    load_slices(tmp_path, config, torch.float32, 0, 2)
    with pytest.raises(UnsupportedModelError, match=r"\(input_layernorm\).*choose --dtype float32"):
        load_slices(tmp_path, config, torch.bfloat16, 0, 2)


def test_tied_weights_of_other_values_are_refused(
    saved: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    saved("llama")
    config = AutoConfig.from_pretrained(tmp_path, tie_word_embeddings=True)
    with pytest.raises(UnsupportedModelError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        load_slices(tmp_path, config, torch.float32, 0, 2)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    assert load_slices(tmp_path, config, torch.float32, 0, 2)
