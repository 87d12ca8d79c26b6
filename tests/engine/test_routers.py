"""Routers of experts with fewer operators choose the same experts, with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from quire.engine.model.layers.routers import softmax_route, ungrouped_route
from quire.engine.model.layers.row_layers import ModuleFunctions

SIZES = {"hidden_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4}


def make_router(**values: object) -> DeepseekV3TopkRouter:
    torch.manual_seed(0)
    router = DeepseekV3TopkRouter(DeepseekV3Config(**SIZES, **values))
    router.weight.data.normal_()
    router.e_score_correction_bias.data.normal_()
    return router.requires_grad_(False)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_route_has_the_bits_of_the_router(norm_topk_prob: bool) -> None:
    router = make_router(n_group=1, topk_group=1, norm_topk_prob=norm_topk_prob, routed_scaling_factor=2.5)
    route = ungrouped_route(router)
    assert route is not None
    inputs = torch.randn(100, 64)
    with ModuleFunctions(router):
        expected = router(inputs)
    for mine, own in zip(route(inputs), expected, strict=True):
        assert torch.equal(mine, own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_a_route_of_softmaxes_has_the_bits_of_the_router(norm_topk_prob: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=64, num_experts=16, norm_topk_prob=norm_topk_prob)
    router = Qwen3MoeTopKRouter(config).to(dtype).requires_grad_(False)
    router.weight.data.normal_()
    route = softmax_route(router)
    assert route is not None
    inputs = torch.randn(100, 64, dtype=dtype)
    with ModuleFunctions(router):
        expected = router(inputs)
    for mine, own in zip(route(inputs), expected, strict=True):
        assert torch.equal(mine, own)


def test_other_routers_are_left_alone() -> None:
    assert ungrouped_route(make_router(n_group=4, topk_group=2)) is None
    without_factor = make_router(n_group=1, topk_group=1)
    del without_factor.routed_scaling_factor
    assert ungrouped_route(without_factor) is None
    config = DeepseekV2Config(**SIZES, n_group=1, topk_group=1)
    assert ungrouped_route(DeepseekV2TopkRouter(config)) is None
