"""The slices of a checkpoint that a rank loads: buffers come along, and other dtypes are not assumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedModel

from quire.benchmarks.model_survey import RANK_SIZES, make_tiny_model
from quire.engine.model import attention
from quire.engine.model.check import UnsupportedModelError
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


def test_weights_that_stay_in_float32_are_named(
    saved: Callable[[str], PreTrainedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"input_layernorm"})
    saved("llama")
    config = AutoConfig.from_pretrained(tmp_path)
    load_slices(tmp_path, config, torch.float32, 0, 2)
    with pytest.raises(UnsupportedModelError, match=r"\(input_layernorm\).*choose --dtype float32"):
        load_slices(tmp_path, config, torch.bfloat16, 0, 2)
