"""The layers of a GPU against the modules that they replace: ``test_triton`` runs this, as it says there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.engine.model.check import check_paging, observe_attention
from quire.engine.model.layers.attention import IMPLEMENTATION, register
from quire.engine.model.layers.gpu_layers import GatedMlp, RmsNorm, fuse_layers
from quire.engine.model.layers.latent_attention import GpuHeadLinear, keep_latents
from quire.kernels import ops
from quire.kernels.triton import attention, blocks, rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if not IS_INTERPRETED and torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [*TOLERANCE], ids=str)
FUSED = {
    "llama": (True, True, True),
    "qwen3": (True, True, True),
    "gemma2": (True, True, True),
    "phi3": (True, True, True),
    # Its MLPs have no gate.
    "arcee": (True, False, True),
    # Its norms take the mean too.
    "gpt_neox": (False, False, True),
}
"""For each architecture, whether norms, MLPs and rotations are replaced."""


def logits(model: Any) -> torch.Tensor:
    token_ids = torch.arange(3, 14, device=DEVICE)[None]
    with torch.inference_mode():
        result: torch.Tensor = model(token_ids).logits.float()
    return result


@DTYPES
@pytest.mark.parametrize("architecture", [*FUSED])
def test_a_model_with_fused_layers_gives_the_same_logits(
    architecture: str, dtype: torch.dtype, tiny_model: Callable[..., Path]
) -> None:
    folder = tiny_model(architecture, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(DEVICE).eval()
    expected = logits(model)
    fuse_layers(model)
    modules = list(model.modules())
    replaced = (
        any(isinstance(each, RmsNorm) for each in modules),
        any(isinstance(each, GatedMlp) for each in modules),
        any("forward" in vars(each) for each in modules),
    )
    assert replaced == FUSED[architecture]
    largest = expected.abs().max()
    assert (logits(model) - expected).abs().max() <= TOLERANCE[dtype] * largest


def test_latent_attention_agrees_with_expanded_heads(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load time compares the logits of paged steps with those of the model's own attention."""
    kernels: dict[str, Any] = {"paged_attention": attention.paged_attention, "write_kv": blocks.write_kv}

    def kernel(name: str, _: str) -> Callable[..., Any]:
        return lambda *arguments, arithmetic=None, **options: kernels[name](*arguments, **options)

    monkeypatch.setattr(ops, "_kernel", kernel)
    register()
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model("minicpm3", num_hidden_layers=1), dtype=torch.float32, attn_implementation=IMPLEMENTATION
    )
    model = model.to(DEVICE).eval()
    keep_latents(model, GpuHeadLinear)
    heads = observe_attention(model, model.config, 64)
    assert heads.latent_dim == model.config.kv_lora_rank
    check_paging(model, heads, model.config.vocab_size, 64)


@DTYPES
@pytest.mark.parametrize("rounds_first", [True, False])
def test_a_row_is_normalized_alike_in_every_batch(dtype: torch.dtype, rounds_first: bool) -> None:
    inputs = torch.randn(7, 3, 200).to(DEVICE, dtype)[:, 1]  # rows that lie apart
    weight = torch.rand(200).to(DEVICE)
    got = rows.rms_norm(inputs, weight, 1e-5, rounds_first=rounds_first)
    wide = inputs.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=0)
    for row in range(7):
        alone = rows.rms_norm(inputs[row : row + 1], weight, 1e-5, rounds_first=rounds_first)
        assert torch.equal(alone[0], got[row])


def test_a_head_of_odd_size_and_many_heads_are_rotated() -> None:
    queries, keys = torch.randn(5, 70, 6, device=DEVICE), torch.randn(5, 3, 6, device=DEVICE)
    angles = torch.randn(5, 6, device=DEVICE)
    got = rows.rotate(queries, keys, angles.cos(), angles.sin())
    for before, after in zip((queries, keys), got, strict=True):
        turned = torch.cat((-before[..., 3:], before[..., :3]), dim=-1)
        expected = before * angles.cos()[:, None] + turned * angles.sin()[:, None]
        torch.testing.assert_close(after, expected)


def test_empty_steps() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    assert rows.rms_norm(empty, torch.ones(8, device=DEVICE), 1e-5, rounds_first=True).shape == (0, 8)
    assert rows.gated_activation(empty, "silu").shape == (0, 4)
    assert rows.rotate(empty[:, None], empty[:, None], empty, empty)[0].shape == (0, 1, 8)
