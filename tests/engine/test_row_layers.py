"""A token's activations have the same bits whatever else a step computes, with any number of threads."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm

from quire.engine.model.layers.packed_linear import pack_linear_layers
from quire.engine.model.layers.row_layers import (
    KernelActivation,
    KernelFunctions,
    PlainRowNorm,
    RowActivation,
    RowNorm,
    make_batch_invariant,
)


@pytest.fixture(params=[1, 3, 4])
def threads(request: pytest.FixtureRequest) -> int:
    num_threads: int = request.param
    torch.set_num_threads(num_threads)
    return num_threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu_fast", "mish"])
@pytest.mark.parametrize("num_features", [176, 512, 2752])
def test_a_row_does_not_depend_on_the_other_rows(
    num_features: int, activation: str, dtype: torch.dtype, threads: int
) -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=num_features, hidden_act=activation)
    mlp = LlamaMLP(config).to(dtype).eval().requires_grad_(False)
    expected = mlp.act_fn
    pack_linear_layers(mlp)
    make_batch_invariant(mlp)
    is_kernel = activation in ("silu", "gelu_pytorch_tanh")
    assert isinstance(mlp.act_fn, KernelActivation if is_kernel else RowActivation)
    generator = torch.Generator().manual_seed(num_features)
    for num_rows in (2, 3, 5, 7, 17, 200):
        values = torch.randn(1, num_rows, num_features, generator=generator).to(dtype) * 3
        whole = mlp.act_fn(values)
        assert whole.shape == values.shape
        torch.testing.assert_close(whole, expected(values))
        for row in range(0, num_rows, 1 + num_rows // 20):
            assert torch.equal(whole[:, row : row + 1], mlp.act_fn(values[:, row : row + 1].clone()))
    hidden = torch.randn(1, 17, 64, generator=generator).to(dtype) * 30
    assert torch.equal(mlp(hidden)[:, 5:6], mlp(hidden[:, 5:6].clone()))


class DoubledRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
    """A norm that does more than its name says."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return twice the norm."""
        return super().forward(hidden_states) * 2  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_recognized_by_what_it_computes(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    norms = [Gemma3RMSNorm(100), LlamaRMSNorm(100), torch.nn.LayerNorm(100), DoubledRMSNorm(100)]
    for norm in norms:
        norm.weight.data.add_(torch.randn(100, generator=generator))
    model = torch.nn.Sequential(*norms).to(dtype).requires_grad_(False)
    expected = list(model)
    make_batch_invariant(model)
    assert [isinstance(norm, RowNorm) for norm in model] == [True, True, True, False]
    inputs = torch.randn((9, 100), generator=generator).to(dtype)
    for norm, original in zip(model, expected, strict=True):
        torch.testing.assert_close(norm(inputs), original(inputs))


def test_a_norm_without_a_weight_is_recognized_too(threads: int) -> None:
    model = torch.nn.Sequential(Llama4TextL2Norm(1e-5))
    [expected] = model
    make_batch_invariant(model)
    assert isinstance(model[0], PlainRowNorm)
    inputs = torch.randn((9, 4, 100), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(inputs), expected(inputs))
    assert torch.equal(model(inputs)[3:4], model(inputs[3:4]))


def test_a_rotation_does_not_depend_on_the_other_positions(threads: int) -> None:
    angles = torch.randn((1, 9, 12), generator=torch.Generator().manual_seed(1)) * 100
    with KernelFunctions():
        whole = torch.polar(torch.ones_like(angles), angles)
        one = torch.polar(torch.ones(1, 1, 12), angles[:, 5:6])
    torch.testing.assert_close(whole, torch.polar(torch.ones_like(angles), angles))
    assert torch.equal(whole[:, 5:6], one)
