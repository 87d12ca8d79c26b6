"""A mask that differs from a causal window is found at whatever position it differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.mask_check import MaskFunction, MaskObserver, OwnMaskError, Window, mask_problem
from quire.engine.weights.loader import load_model

NO_PADDING = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize("num_positions", [1, 2, 512, 131_072])
@pytest.mark.parametrize("window", [None, 1, 24, 4096])
def test_a_causal_window_passes(window: int | None, num_positions: int) -> None:
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    assert mask_problem([Window(window)], [function], None, num_positions) is None


@pytest.mark.parametrize("num_positions", [1, 2, 8193, 131_072])
@pytest.mark.parametrize("size", [1, 24, 8192])
def test_chunks_pass(size: int, num_positions: int) -> None:
    function = chunked_causal_mask_function(size, NO_PADDING)
    assert mask_problem([Window(size, is_chunked=True)], [function], None, num_positions) is None


@pytest.mark.parametrize(
    ("window", "function"),
    [
        (Window(None), sliding_window_causal_mask_function(64)),
        (Window(None), sliding_window_causal_mask_function(131_071)),
        (Window(4096), sliding_window_causal_mask_function(4097)),
        (Window(4097), sliding_window_causal_mask_function(4096)),
        (Window(4096), causal_mask_function),
        (Window(None), chunked_causal_mask_function(8192, NO_PADDING)),
        (Window(8192), chunked_causal_mask_function(8192, NO_PADDING)),
        (Window(8192, is_chunked=True), sliding_window_causal_mask_function(8192)),
        (Window(8192, is_chunked=True), chunked_causal_mask_function(8191, NO_PADDING)),
        (Window(None), bidirectional_mask_function),
    ],
)
def test_another_mask_is_found(window: Window, function: MaskFunction) -> None:
    problem = mask_problem([Window(None), window], [causal_mask_function, function], None, 131_072)
    assert problem is not None
    assert problem.startswith("layer 1 gives attention")


def test_a_window_that_only_the_configuration_names_is_found() -> None:
    problem = mask_problem([Window(None)] * 2, [None, None], ["full_attention", "sliding_attention"], 512)
    assert problem == "layer 1 is of type 'sliding_attention' and gives attention no window"


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 4, 4), torch.ones(1, 1, 1, 1)])
def test_a_mask_that_the_model_made_itself_is_refused(mask: torch.Tensor) -> None:
    observer = MaskObserver()
    assert observer.function_of(None) is None
    with pytest.raises(OwnMaskError):
        observer.function_of(mask)


@pytest.mark.parametrize("window", [24, 64, 300])
@pytest.mark.parametrize("names_its_layers", [True, False])
def test_a_model_that_keeps_its_window_in_the_mask_is_refused(
    window: int, names_its_layers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not names_its_layers:
        monkeypatch.setattr("quire.engine.model.mask_check._WINDOWED_LAYERS", set())
    config = Qwen2MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention"],
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="paged attention would see other tokens"):
        load_model(str(tmp_path), "float32", torch.device("cpu"))
