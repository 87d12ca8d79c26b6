"""A token gets the same bits from its experts alone, among others, and with any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers.experts import pack_experts, register
from quire.engine.model.layers.packed_linear import pack_linear_layers
from quire.engine.model.layers.row_layers import make_batch_invariant
from quire.engine.weights.loader import load_model
from quire.kernels.cpu.products.amx_product import FLOAT32
from quire.settings.setting import SettingError
from tests.testing.tiny_models import load_reference

ARCHITECTURES = ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3", "llama4"]
TinyModel = Callable[..., Path]


def block_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the router and experts of the last layer, as a function of ``[num_tokens, hidden_size]``."""
    layer = model.model.layers[-1]
    block = layer.mlp if hasattr(layer, "mlp") else layer.feed_forward

    def run(hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            output = block(hidden[None])
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result.reshape(hidden.shape)

    return run


def hidden_states(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((num_tokens, 64), generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("bfloat16", "auto"), *(("float32", each) for each in ("auto", "int8", "int4", "w8a8"))],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_does_not_depend_on_the_others(
    tiny_model: TinyModel, architecture: str, dtype: str, weight_dtype: str
) -> None:
    model = load_model(str(tiny_model(architecture)), dtype, torch.device("cpu"), weight_dtype)
    run = block_of(model.module)
    hidden = hidden_states(200, model.dtype)
    expected = run(hidden)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(run(hidden.flip(0)).flip(0), expected), num_threads
        for start, end in ((0, 1), (7, 8), (199, 200), (1, 6), (30, 47), (64, 190)):
            assert torch.equal(run(hidden[start:end]), expected[start:end]), (num_threads, start, end)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_results_are_those_of_transformers(tiny_model: TinyModel, architecture: str) -> None:
    folder = tiny_model(architecture)
    run = block_of(load_model(str(folder), "float32", torch.device("cpu")).module)
    hidden = hidden_states(50, torch.float32)
    expected = block_of(load_reference(folder))(hidden)
    torch.testing.assert_close(run(hidden), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def make_mixtral() -> MixtralForCausalLM:
    register()
    torch.manual_seed(1)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    ).eval()


def test_equal_scores_of_a_router_give_the_same_experts_in_any_company() -> None:
    model = make_mixtral()
    router = model.model.layers[0].mlp.gate
    router.weight.data[1:] = router.weight.data[0]
    pack_linear_layers(model)
    pack_experts(model, "auto", FLOAT32)
    make_batch_invariant(model)
    run = block_of(model)
    hidden = hidden_states(40, torch.float32)
    assert torch.equal(run(hidden)[11:12], run(hidden[11:12]))


def test_a_number_without_an_expert_adds_nothing() -> None:
    model = make_mixtral()
    pack_experts(model, "auto", FLOAT32)
    experts = model.model.layers[0].mlp.experts
    hidden, weights = hidden_states(2, torch.float32), torch.ones((2, 2))
    with torch.inference_mode():
        both = experts(hidden, torch.tensor([[1, 2], [3, 1]]), weights)
        found = experts(hidden, torch.tensor([[1, 4], [4, 4]]), weights)
        alone = experts(hidden, torch.tensor([[1], [3]]), weights[:, :1])
    assert torch.equal(found[0], alone[0])
    assert not found[1].any()
    assert not torch.equal(both[0], alone[0])


def test_experts_that_do_not_follow_the_interface_are_refused() -> None:
    model = make_mixtral()
    model.model.layers[0].mlp.experts._apply_gate = lambda values: values.chunk(2, dim=-1)[0]
    with pytest.raises(UnsupportedModelError, match=r"MixtralExperts differ by \d+%"):
        pack_experts(model, "auto", FLOAT32)


def test_experts_that_cannot_be_quantized_are_named(tiny_model: TinyModel) -> None:
    folder = tiny_model("mixtral", intermediate_size=48)
    with pytest.raises(SettingError, match="weights cannot be int4: down_proj has 48 inputs"):
        load_model(str(folder), "float32", torch.device("cpu"), "int4")
