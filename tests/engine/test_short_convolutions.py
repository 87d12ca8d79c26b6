"""LFM2's layers with a short convolution through everything that moves, shares and restores blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.errors import KvBudgetError
from quire.engine.speculation.ngram_proposer import NgramProposer
from quire.engine.speculation.speculator import Speculator
from quire.engine.weights.adapters import UnsupportedAdapterError, check_adaptable
from quire.engine.weights.loader import LoadedModel, load_model
from quire.llm import LLM
from quire.settings.setting import SettingError
from tests.testing.random_schedules import check_random_schedule
from tests.testing.tiny_engine import (
    CPU,
    check_prefix_hit,
    make_engine,
    make_prompt,
    make_request,
    run_in_order,
)
from tests.testing.tiny_models import best_tokens, load_reference

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def lfm2(tiny_model: TinyModel) -> LoadedModel:
    return load_model(str(tiny_model("lfm2")), "float32", CPU)


def test_a_convolution_is_a_layer_with_a_window(lfm2: LoadedModel) -> None:
    """Its 96 inputs fill the keys and values of two layers: 48 each, of which the second pair has some."""
    assert lfm2.windows == (3, 3, None, 3, 3, None)
    shape = lfm2.kv_shape(16)
    assert (shape.num_kv_heads, shape.head_dim) == (1, 24)
    assert (shape.window, shape.window_layers, shape.window_blocks) == (3, (0, 1, 3, 4), 1)


@pytest.mark.parametrize(
    "sizes", [{"conv_L_cache": 2}, {"conv_L_cache": 6}, {"hidden_size": 80}, {"conv_bias": False}]
)
def test_other_sizes(tiny_model: TinyModel, sizes: dict[str, Any]) -> None:
    folder = tiny_model("lfm2", **sizes)
    engine = make_engine(load_model(str(folder), "float32", CPU), max_num_batched_tokens=20)
    prompt = make_prompt(70)
    [tokens] = run_in_order(engine, make_request("r", prompt, temperature=0.0))
    assert tokens == best_tokens(load_reference(folder), prompt, tokens)


@pytest.mark.parametrize("num_equal", [16, 17, 18, 19, 48, 50, 63, 64])
def test_a_prefix_hit_gives_the_same_bits(lfm2: LoadedModel, num_equal: int) -> None:
    assert check_prefix_hit(lfm2, num_equal) >= num_equal // 16 * 16


@pytest.mark.slow
@pytest.mark.parametrize("is_swapped", [True, False])
@pytest.mark.parametrize("seed", [0, 2, 3])
def test_random_schedules(lfm2: LoadedModel, seed: int, is_swapped: bool) -> None:
    check_random_schedule(lfm2, seed, is_swapped=is_swapped, speculator=Speculator(NgramProposer(), 4))


def test_budgets_adapters_and_ranks_are_refused(lfm2: LoadedModel, tiny_model: TinyModel) -> None:
    with pytest.raises(KvBudgetError, match="must be absent: "):
        make_engine(lfm2).add_request(make_request("r", make_prompt(40), kv_budget_tokens=64))
    with pytest.raises(UnsupportedAdapterError, match="lfm2 does not"):
        check_adaptable(lfm2)
    with pytest.raises(SettingError, match="layers with a short convolution"):
        LLM(str(tiny_model("lfm2")), dtype="float32", num_blocks=64, threads=1, tensor_parallel_size=2)
