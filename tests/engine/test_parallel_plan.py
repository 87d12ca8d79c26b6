"""Which layers of a model are divided among ranks, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from quire.engine.model.parallel_plan import Division, ParallelPlan, read_plan
from quire.engine.model.parallel_shares import DividedExperts, Shares
from quire.settings.setting import SettingError
from tests.testing.tiny_models import ARCHITECTURES

_SIX_HEADS = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_SIZES = {"num_attention_heads": 8, "intermediate_size": 256}


def plan_of(architecture: str, **overrides: Any) -> ParallelPlan:
    class_name, values = ARCHITECTURES[architecture]
    config = getattr(transformers, class_name)(**{**values, **overrides})
    with torch.device("meta"):
        return read_plan(transformers.AutoModelForCausalLM.from_config(config))


def first_layer(plan: ParallelPlan) -> dict[str, tuple[str, int]]:
    return {
        name.partition("layers.0.")[2]: (each.division.value, each.shares.num_segments)
        for name, each in plan.linears.items()
        if ".0." in name
    }


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "smollm3", "granite", "mistral", "gemma2"]
)
def test_attention_and_mlp_are_divided(architecture: str) -> None:
    plan = plan_of(architecture, **_SIZES)
    assert first_layer(plan) == {
        "self_attn.q_proj": ("column", 8),
        "self_attn.k_proj": ("column", 8),
        "self_attn.v_proj": ("column", 8),
        "self_attn.o_proj": ("row", 8),
        "mlp.gate_proj": ("column", 8),
        "mlp.up_proj": ("column", 8),
        "mlp.down_proj": ("row", 8),
    }
    assert plan.attention == Shares(8, 8, 2)
    for num_ranks in range(1, 9):
        plan.check(num_ranks)


@pytest.mark.parametrize("architecture", ["phi3", "gpt2", "opt"])
def test_models_without_a_plan_for_whole_blocks_are_refused(architecture: str) -> None:
    with pytest.raises(SettingError, match="no plan"):
        plan_of(architecture).check(2)


def test_experts_need_no_plan() -> None:
    plan = plan_of("gpt_oss", num_local_experts=6)
    assert plan.linears == {}
    assert plan.experts == {f"model.layers.{layer}.mlp.experts": DividedExperts(6) for layer in range(3)}
    plan.check(4)
    with pytest.raises(SettingError, match=r"layers\.0\.mlp\.experts: its 6 experts form only 4 groups"):
        plan.check(5)


@pytest.mark.parametrize(("architecture", "name"), [("qwen2_moe", "expert"), ("glm4_moe", "experts")])
def test_experts_that_each_token_uses_are_divided_by_width(architecture: str, name: str) -> None:
    plan = plan_of(architecture, shared_expert_intermediate_size=128, moe_intermediate_size=128)
    assert plan.num_segments(0, 1)[f"model.layers.1.mlp.shared_{name}.down_proj"] == 4


@pytest.mark.parametrize("num_experts", [1, 2, 5, 8, 60, 128])
def test_each_expert_is_on_one_rank(num_experts: int) -> None:
    divided = DividedExperts(num_experts)
    for num_ranks in range(1, divided.shares.num_segments + 1):
        parts = [range(num_experts)[divided.own(rank, num_ranks)] for rank in range(num_ranks)]
        assert [expert for part in parts for expert in part] == list(range(num_experts))
        assert all(parts)


def test_an_attention_whose_queries_and_keys_are_one_layer_is_not_divided() -> None:
    plan = plan_of("gpt_neox", hidden_size=256, intermediate_size=256)
    assert set(first_layer(plan)) == {"mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert plan.attention is None
    plan.check(2)


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "problem"),
    [
        (_SIX_HEADS, 3, "self_attn.o_proj: its inputs have only 2 segments"),
        (
            {**_SIZES, "hidden_size": 384, "num_attention_heads": 24, "num_key_value_heads": 3},
            2,
            "self_attn.o_proj: its 24 heads in 3 groups, and its 8 segments .* between 1 equal parts only",
        ),
        ({**_SIZES, "intermediate_size": 96}, 2, "mlp.down_proj: its inputs have only 1 segments"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(
    overrides: dict[str, int], num_ranks: int, problem: str
) -> None:
    with pytest.raises(SettingError, match=problem):
        plan_of("llama", **overrides).check(num_ranks)


def test_segments_depend_on_the_model_only() -> None:
    plan = plan_of("llama", **_SIZES)
    rows = {name for name, each in plan.linears.items() if each.division is Division.ROW}
    assert plan.num_segments(0, 1) == dict.fromkeys(rows, 8)
    for num_ranks in range(1, 9):
        own = [plan.num_segments(rank, num_ranks) for rank in range(num_ranks)]
        assert {name: sum(each[name] for each in own) for name in rows} == dict.fromkeys(rows, 8)


def test_a_size_that_does_not_divide_the_heads_is_taken_if_there_are_segments() -> None:
    plan_of("llama", **_SIX_HEADS).check(2)
    plan_of("llama", **_SIZES, num_key_value_heads=8).check(3)
