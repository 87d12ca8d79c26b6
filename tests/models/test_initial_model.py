"""The untrained demo model: attention that begins as a look-up."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from quire.models.training.initial_model import make_model


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return make_model(tokenizer).eval()


def test_the_seed_decides(tokenizer: Tokenizer, model: LlamaForCausalLM) -> None:
    torch.manual_seed(1)
    again = make_model(tokenizer).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_the_first_layer_looks_one_and_two_tokens_back(model: LlamaForCausalLM) -> None:
    model.set_attn_implementation("eager")
    ids = torch.randperm(1900)[:200] + 6
    with torch.inference_mode():
        [attention] = model(ids[None], output_attentions=True).attentions[0]
    for head, weights in enumerate(attention):
        distance = 1 + head % 2
        assert weights.diagonal(-distance)[2:].mean() > 0.5, head


def test_queries_of_later_layers_begin_equal_to_their_keys(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers[1:]:
        attention = layer.self_attn
        keys = attention.k_proj.weight.unflatten(0, (-1, attention.head_dim))
        queries = attention.q_proj.weight.unflatten(0, (-1, attention.head_dim))
        assert torch.equal(queries, keys.repeat_interleave(attention.num_key_value_groups, 0))
