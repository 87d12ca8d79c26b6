"""What cannot run over paged blocks is refused at load, with the reason; it never gives wrong tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.benchmarks.model_survey import make_tiny_model
from quire.engine.model_check import UnsupportedModelError
from quire.engine.model_loader import load_model


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("mamba", "layers of type \\['linear_attention'\\] keep no paged KV cache"),
        ("bloom", "no layer that calls transformers' attention interface"),
        ("stablelm", "did not pass paged_step on"),
        ("diffllama", "called by the layers \\[0, 0, 1, 1\\]"),
        ("deepseek_v2", "keys and values differ in shape"),
        ("doge", "gives attention masks of its own"),
        ("gptj", "transformers cannot load"),
    ],
)
def test_it_is_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    make_tiny_model(architecture).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(str(tmp_path), "float32", torch.device("cpu"))


def test_rope_by_the_longest_sequence_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic' rotates by the longest sequence"):
        load_model(str(tmp_path), "float32", torch.device("cpu"))


def test_one_key_value_head_without_a_name_in_the_configuration(tmp_path: Path) -> None:
    make_tiny_model("gpt_bigcode").save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "float32", torch.device("cpu")).num_kv_heads == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_passes(dtype: str, tmp_path: Path) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path)
    assert str(load_model(str(tmp_path), dtype, torch.device("cpu")).dtype) == f"torch.{dtype}"
