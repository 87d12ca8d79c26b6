"""Models with attention code of their own, or unusual positions, give the tokens of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.benchmarks import model_sizes
from quire.benchmarks.model_survey import generated_by_transformers, make_tiny_model
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers import attention, own_attention
from quire.engine.weights.loader import load_model
from tests.testing.tiny_engine import make_engine, make_request, run_in_order

CPU = torch.device("cpu")
NUM_NEW = 24
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {"attn_config": {"clip_qkv": 1.0}},
    "roformer": {"rotary_value": True},
}
"""Values that published models have and the survey's do not."""


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "architecture",
    [
        *("bart", "bloom", "codegen", "diffllama", "falcon", "git", "gpt_neo", "gptj", "hrm_text"),
        *("megatron-bert", "mpt", "openai-gpt", "pegasus", "roberta", "roformer", "xglm"),
    ],
)
def test_chunks_and_cached_prefixes_give_the_tokens_of_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**model_sizes.OVERRIDES.get(architecture, {}), **VARIANTS.get(architecture, {})}
    monkeypatch.setitem(model_sizes.OVERRIDES, architecture, values)
    model = make_tiny_model(architecture)
    prompt = torch.randint(3, 320, (90,), generator=torch.Generator().manual_seed(1))
    expected = generated_by_transformers(model, prompt)
    engine = make_engine(load_model(save(model, tmp_path), "float32", CPU), max_num_batched_tokens=20)
    options = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True}
    whole = make_request("whole", prompt.tolist(), **options)
    again = make_request("again", prompt.tolist(), **options)
    beside = make_request("beside", prompt.tolist()[::-1], **options)
    assert run_in_order(engine, whole) == [expected]
    assert run_in_order(engine, beside, again)[1] == expected
    assert again.num_cached_tokens == 89


def test_layers_that_call_attention_twice_have_blocks_for_both_calls(tmp_path: Path) -> None:
    model = load_model(save(make_tiny_model("diffllama"), tmp_path), "float32", CPU)
    assert model.num_layers == 2 * model.module.config.num_hidden_layers


def test_positions_before_the_first_one_are_not_counted(tmp_path: Path) -> None:
    model = load_model(save(make_tiny_model("roberta"), tmp_path), "float32", CPU)
    assert model.max_position_embeddings == 512 - 1


@pytest.mark.parametrize(
    ("architecture", "values", "dtype", "reason"),
    [
        ("falcon", {"alibi": True}, "float32", "falcon: with alibi it rounds position biases"),
        ("bloom", {}, "bfloat16", "bloom: in 16 bits .* choose the dtype float32"),
        ("bart", {"is_encoder_decoder": True}, "float32", "bart: encoder-decoder models are not supported"),
        (
            "big_bird",
            {"attention_type": "block_sparse"},
            "float32",
            "big_bird: with attention_type 'block_sparse'",
        ),
    ],
)
def test_models_that_would_give_other_tokens_are_refused(
    architecture: str, values: dict[str, Any], dtype: str, reason: str, tmp_path: Path
) -> None:
    model = make_tiny_model(architecture)
    folder = save(model, tmp_path)
    model.config.update(values)
    model.config.save_pretrained(folder)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(folder, dtype, CPU)


def test_a_wrong_replacement_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unscaled(_: Any, attend: attention.Attend, *inputs: torch.Tensor) -> Any:
        return attend(*inputs, scaling=1.0).transpose(1, 2), None

    replacement = own_attention._REPLACEMENTS["gptj"]._replace(function=unscaled)
    monkeypatch.setitem(own_attention._REPLACEMENTS, "gptj", replacement)
    model = make_tiny_model("gptj")
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        load_model(save(model, tmp_path), "float32", CPU)
