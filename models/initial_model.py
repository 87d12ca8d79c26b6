"""The untrained demo model: a small Llama whose attention begins as a rough look-up.

From random weights, looking up an item takes several parts that are of use only together, and most of the
training goes by before they meet. So training starts from attention that can nearly do it, and learns the
rest in minutes.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from quire.models.train_tokenizer import BOS, CONTEXT, END, PAD

EMBEDDING_SCALE = 0.06
"""Deviation of the embeddings: wide enough that a copied token stands out among the logits."""

OUTPUT_SCALE = 0.25
"""Of what attention copies, beside the token it is added to."""

FAST_PAIRS = 3
"""Rotary pairs that the first layer's queries and keys use to find a distance of one or two tokens."""

SHARPNESS = 0.8
"""Of that: the first layer's attention falls almost wholly on the wanted token."""


def make_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Make the untrained model in float32; torch's seed decides the weights."""
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        # Half of the rotary pairs hardly turn within the context: they compare items, wherever these stand.
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_SCALE)
    for layer in model.model.layers:
        start_as_lookup(layer.self_attn, config.head_dim)
    start_with_look_back(model)
    return model


@torch.no_grad()
def start_as_lookup(attention: LlamaAttention, head_dim: int) -> None:
    """Let attention begin by finding tokens like the present one and copying what it finds.

    Queries start equal to keys, and the output projection as the transpose of the values.
    """
    keys = attention.k_proj.weight.unflatten(0, (-1, head_dim))
    values = attention.v_proj.weight.unflatten(0, (-1, head_dim))
    for head in (*keys, *values):
        torch.nn.init.orthogonal_(head)
    groups = attention.num_key_value_groups
    attention.q_proj.weight.copy_(keys.repeat_interleave(groups, 0).flatten(0, 1))
    copied = values.repeat_interleave(groups, 0).flatten(0, 1).T
    attention.o_proj.weight.copy_(copied * OUTPUT_SCALE / groups)


@torch.no_grad()
def start_with_look_back(model: LlamaForCausalLM) -> None:
    """Let the first layer's heads begin by looking one or two tokens back, whatever the tokens are.

    A note is found by its item, but its value stands two tokens later, so the value has to know the item it
    belongs to. All embeddings get a common part; the queries and keys of the first layer see little else, in
    the fastest rotary pairs, turned so that they agree at the wanted distance.
    """
    config = model.config
    embedding = model.model.embed_tokens.weight
    common = functional.normalize(torch.randn(config.hidden_size), dim=0)
    embedding -= torch.outer(embedding @ common, common)
    embedding += common * embedding.norm(dim=1).mean()

    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(FAST_PAIRS) / half)
    attention = model.model.layers[0].self_attn
    keys = attention.k_proj.weight.unflatten(0, (-1, config.head_dim))
    queries = attention.q_proj.weight.unflatten(0, (-1, config.head_dim))
    keys *= 0.1
    queries *= 0.1
    keys[:, :FAST_PAIRS] += common * SHARPNESS
    for index, query in enumerate(queries):
        # A query at position p meets the key at p - distance when both are turned to the same angle.
        distance = 1 + index % 2
        angles = -frequencies * distance
        query[:FAST_PAIRS] += torch.outer(angles.cos(), common) * SHARPNESS
        query[half : half + FAST_PAIRS] += torch.outer(angles.sin(), common) * SHARPNESS
