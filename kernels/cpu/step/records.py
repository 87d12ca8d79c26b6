"""The records that describe a model and a step to the step's program."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.products.low_rank import ADAPTED

NORM = np.dtype(
    [
        *((name, np.int64) for name in ("weight", "bias", "kind")),
        ("epsilon", np.float64),
        ("residual_scale", np.float64),
    ]
)
"""A norm: addresses of float32 values, and a ``rows.Norm``.

If "residual_scale" is not 0, the result with this factor replaces the residual stream.
"""

LINEAR = np.dtype(
    [
        *((name, np.int64) for name in ("multiply", "weight", "bias", "in_features", "num_segments")),
        *((name, np.int64) for name in ("num_units", "input_column", "borders", "number")),
    ]
)
"""A linear layer; 0 units if there is none.

Its addresses are those of the ``unit_kernel`` of its weights, of these, and of the float32 bias or 0.
"input_column" is not 0 if its inputs lie among the outputs of other layers. If its inputs are divided among
processes, "borders" is the address of the processes' first segments (see ``add_slots``), and "number" the
number of such layers before it. Otherwise both are 0. Sums of divided inputs are partial, and the bias is
added after the sum over the processes.
"""

LAYER = np.dtype(
    [
        *((name, NORM) for name in ("attention_norm", "query_norm", "key_norm", "after_attention_norm")),
        *((name, LINEAR) for name in ("query", "key", "value", "output")),
        *((name, LINEAR) for name in ("query_up", "key_heads", "value_heads")),
        *((name, NORM) for name in ("mlp_norm", "after_mlp_norm")),
        *((name, LINEAR) for name in ("gate", "up", "down")),
        ("activation", np.int64),
        ("has_experts", np.int64),
        *((name, np.float64) for name in ("query_scale", "attention_scale", "mlp_scale")),
        ("query_stride", np.int64),
        ("latent_dim", np.int64),
        ("is_interleaved", np.int64),
        ("cosines", np.int64),
        ("sines", np.int64),
        ("kv", np.int64),
        ("kv_scales", np.int64),
        ("slots", np.int64),
        ("attention", np.int64),
        ("states", np.int64),
    ]
)
"""A layer.

Up to three linear layers compute the queries, keys and values; "query" may compute all of them. A head's
query begins "query_stride" values after that of the head before. If that is more than head_dim, the gate of
the head's result lies between them. Without "up" there is no gate, and "gate" is the only linear layer before
the activation. With "has_experts" these layers are an expert of all tokens, whose outputs a module gets.

With latent attention "latent_dim" is not 0. "query" then computes the queries or, with "query_up", what that
expands to queries; "key" the latent and the key that is rotated; and "value", if there is one, a gate of each
head. "key_heads" and "value_heads" have a weight for each head (see ``LatentExpansion``). If a rotation is
interleaved, it rotates neighbors instead of both halves of its inputs.

If "states" is not 0, it is the address of a ``STATE_LAYER``, which has the place of attention.
"""

GATHERED = np.dtype([(name, np.int64) for name in ("values", "width", "runs", "num_runs")])
"""Outputs of linear layers that are gathered as "values", with "width" for each token.

They lie in "runs" of neighbors: int64 ``[num_runs, 2]``, the first column and the number of columns of each.
"""

STATE_LAYER = np.dtype(
    [
        *((name, GATHERED) for name in ("inputs", "steps", "gate")),
        *((name, np.int64) for name in ("projections", "num_projections", "num_expansions")),
        *((name, np.int64) for name in ("stride", "expanded_column", "slopes", "activation")),
        *((name, np.int64) for name in ("rounded", "rounded_width")),
        *((name, np.int64) for name in ("convolution_kernel", "convolution")),
        *((name, np.int64) for name in ("recurrence_kernel", "recurrence")),
        *((name, np.int64) for name in ("norm_kernel", "norm")),
    ]
)
"""What a layer with a state computes before its last linear layer.

"projections" is the address of its linear layers, and then of those of their outputs, the "expansions". The
outputs of all these layers lie side by side, "stride" for each token, and those of its expansions from
"expanded_column" on. "slopes" is the address of factors of the steps, or 0. "activation" is that of the
inputs. Three kernels follow, at their addresses and with the addresses of their arguments. Without a
convolution its addresses are 0. Unless "rounded_width" is 0, it is the number of the recurrence's outputs for
a token, which lie at "rounded" and are rounded to the model's dtype.
"""

_ADDRESSES = (
    *("token_ids", "positions", "kept_rows", "embedding", "position_embedding", "layers"),
    *("hidden", "normed", "qkv", "queries", "attended", "update", "mlp", "operands", "logits"),
    *("counters", "next_thread", "arrivals", "team_size", "yield_core", "attend", "exchange"),
)
_INTEGERS = (
    *("num_tokens", "num_logits", "last_round", "first_layer", "begins_with_mlp", "num_layers"),
    *("hidden_size", "num_heads", "num_kv_heads", "head_dim", "rotary_dim", "key_column", "value_column"),
    *("qkv_stride", "update_stride", "mlp_stride", "logits_stride"),
    *("is_embedding_packed", "position_offset", "block_size", "block_stride", "value_offset", "head_stride"),
    *("scale_block_stride", "scale_value_offset", "kv_format"),
)
STEP = np.dtype(
    [
        *((name, np.int64) for name in _ADDRESSES + _INTEGERS),
        ("embedding_scale", np.float64),
        ("scale_per_magnitude", np.float64),
        ("final_norm", NORM),
        ("no_norm", NORM),
        ("head", LINEAR),
        ("no_linear", LINEAR),
        ("adapted", ADAPTED),
    ]
)
"""A step: the model, its buffers, and the step's tokens.

A program gets two of them. The second has only the tokens after which logits or hidden states are needed:
``kept_rows`` are their rows in the first. From the attention of the last layer on, the others need not be
computed. Only the first ``num_logits`` tokens get logits; ``normed`` ends with the hidden states of all.
"""

COUNTERS_PER_LAYER, FIRST_STATE_COUNTER, ATTENTION_COUNTER = 8, 5, 7
"""Counters of a layer's work, those of the kernels of its state, and that of the kernel of attention.

The others belong to linear layers: the inputs of attention, "output", "gate", "down", and expansions.
"""
