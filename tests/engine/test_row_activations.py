"""A token's activations have the same bits whatever else a step computes, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from quire.engine.packed_linear import pack_linear_layers
from quire.engine.row_layers import RowActivation, make_batch_invariant


@pytest.fixture(params=[1, 3, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_features", [176, 512, 2752])
def test_a_row_does_not_depend_on_the_other_rows(
    num_features: int, activation: str, dtype: torch.dtype, threads: int
) -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=num_features, hidden_act=activation)
    mlp = LlamaMLP(config).to(dtype).eval().requires_grad_(False)
    expected = mlp.act_fn
    pack_linear_layers(mlp)
    make_batch_invariant(mlp)
    assert isinstance(mlp.act_fn, RowActivation)
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
