"""What cannot run over paged blocks is refused at load, with the reason; it never gives wrong tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.benchmarks.model_sizes import SIZES
from quire.benchmarks.model_survey import make_tiny_model
from quire.engine.model.check import UnsupportedModelError
from quire.engine.weights import loader as model_loader
from quire.engine.weights.loader import load_model


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("zamba", "layers of type .*linear_attention.* keep no paged KV cache"),
        ("xlm", "no layer that calls transformers' attention interface"),
        ("deepseek_v32", "layers of type \\['indexed_attention'\\] keep no paged KV cache"),
        ("doge", "gives attention masks of its own"),
    ],
)
def test_it_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    make_tiny_model(architecture).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path), "float32", torch.device("cpu"))


# The kernels of these sizes are those of the other tests' models, so that they are compiled once.
HEADS = {"num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 1, "head_dim": 32}
SHARED = {**SIZES, **HEADS}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + each for each in range(8)],
    "original_max_position_embeddings": 128,
}


def save_nested_longrope(folder: Path) -> str:
    """Save a model whose rotations by layer type depend on the longest sequence of the batch."""
    make_tiny_model("gemma3_text", SHARED).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    half = config["head_dim"] // 2
    rope = LONGROPE | {name: (LONGROPE[name] * half)[:half] for name in ("short_factor", "long_factor")}
    config["rope_parameters"] = {kind: rope for kind in config["rope_parameters"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_rope_that_changes_after_its_original_positions_has_only_these(tmp_path: Path) -> None:
    model = load_model(save_nested_longrope(tmp_path), "float32", torch.device("cpu"))
    assert model.max_position_embeddings == LONGROPE["original_max_position_embeddings"]


def test_a_dynamic_rope_has_all_its_positions(tmp_path: Path) -> None:
    model = make_tiny_model("llama", SHARED)
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model.save_pretrained(tmp_path)
    positions = load_model(str(tmp_path), "float32", torch.device("cpu")).max_position_embeddings
    assert positions == SIZES["max_position_embeddings"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_finds_values_that_depend_on_the_longest_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(model_loader, "most_positions", lambda config: config.max_position_embeddings)
    with pytest.raises(UnsupportedModelError, match="depends on the longest sequence of the batch"):
        load_model(save_nested_longrope(tmp_path), dtype, torch.device("cpu"))


def test_a_model_that_ignores_which_logits_to_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model("llama", SHARED).save_pretrained(tmp_path)
    monkeypatch.setattr(
        "transformers.models.llama.modeling_llama.slice_logits_to_keep", lambda hidden, _: hidden
    )
    with pytest.raises(UnsupportedModelError, match="it ignores logits_to_keep"):
        load_model(str(tmp_path), "float32", torch.device("cpu"))


def test_one_key_value_head_without_a_name_in_the_configuration(tmp_path: Path) -> None:
    make_tiny_model("gpt_bigcode", SHARED).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "float32", torch.device("cpu")).num_kv_heads == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_passes(dtype: str, tmp_path: Path) -> None:
    make_tiny_model("llama", SHARED).save_pretrained(tmp_path)
    assert str(load_model(str(tmp_path), dtype, torch.device("cpu")).dtype) == f"torch.{dtype}"
