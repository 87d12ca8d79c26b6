"""The untrained demo model: a small Llama whose attention begins as a rough look-up.

Looking up an item needs several parts of the model, and each is useful only with the others. From random
weights, they begin to work together only late in the training. Training therefore starts from attention that
can nearly look items up, and learns the rest in minutes.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from quire.models.training.tokenizer import BOS, CONTEXT, END, PAD

EMBEDDING_SCALE = 0.06
"""Standard deviation of the embeddings, large enough that a copied token stands out among the logits."""

OUTPUT_SCALE = 0.25
"""Scale of the vectors that attention copies, relative to the token that they are added to."""

FAST_PAIRS = 3
"""Number of rotary pairs with which the first layer finds the token one or two positions back."""

SHARPNESS = 0.8
"""Scale of those queries and keys, large enough that almost all attention falls on that token."""


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
        # Half of the rotary pairs hardly rotate within the context, so they compare items at any distance.
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
    """Initialize attention so that it finds tokens equal to the present one and copies them.

    The query weights start equal to the key weights, and the output projection as the transpose of the value
    weights.
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
    """Initialize the first layer's heads so that they attend one or two tokens back, to any token.

    A note is found by its item, but its value follows two tokens later, so the value must know its item. All
    embeddings get a common component. The first layer's queries and keys depend almost only on this
    component. They use the fastest rotary pairs, rotated so that a query matches the key at the right
    distance.
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
        # A query at position p matches the key at p - distance if both are rotated to the same angle.
        distance = 1 + index % 2
        angles = -frequencies * distance
        query[:FAST_PAIRS] += torch.outer(angles.cos(), common) * SHARPNESS
        query[half : half + FAST_PAIRS] += torch.outer(angles.sin(), common) * SHARPNESS
