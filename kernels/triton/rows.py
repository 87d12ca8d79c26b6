"""What a model computes row by row, on GPUs: one launch each for norms, gated activations and rotations."""

from __future__ import annotations

from typing import Literal

import torch
import triton

from quire.kernels.triton.row_kernels import gated_activation_kernel, rms_norm_kernel, rotate_kernel

GatedKind = Literal["silu", "gelu_tanh"]

_COLUMNS_PER_PROGRAM = 1024
_VALUES_PER_PROGRAM = 4096


def rms_norm(
    inputs: torch.Tensor, weight: torch.Tensor, epsilon: float, *, rounds_first: bool
) -> torch.Tensor:
    """Normalize each row of ``[..., length]`` by its root mean square.

    Args:
        weight: float32 ``[length]``.
        rounds_first: whether a row is rounded to its dtype before it is multiplied by the weight.
    """
    length = inputs.shape[-1]
    rows = inputs.reshape(-1, length)
    outputs = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    if not rows.numel():
        return outputs
    block = triton.next_power_of_2(length)
    with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
        rms_norm_kernel[(rows.shape[0],)](
            outputs,
            rows,
            weight,
            epsilon,
            rows.stride(0),
            LENGTH=length,
            BLOCK=block,
            ROUNDS_FIRST=rounds_first,
            num_warps=min(max(block // 512, 1), 16),
        )
    return outputs


def gated_activation(gate_up: torch.Tensor, kind: GatedKind) -> torch.Tensor:
    """Return ``activation(gate) * up`` ``[..., length]`` of rows ``[..., 2 * length]``, gate first."""
    length = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * length).contiguous()
    outputs = gate_up.new_empty((*gate_up.shape[:-1], length))
    if not outputs.numel():
        return outputs
    grid = (rows.shape[0], triton.cdiv(length, _COLUMNS_PER_PROGRAM))
    with torch.cuda.device_of(gate_up):  # type: ignore[no-untyped-call]
        gated_activation_kernel[grid](outputs, rows, length, KIND=kind, BLOCK=_COLUMNS_PER_PROGRAM)
    return outputs


def rotate(
    queries: torch.Tensor, keys: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the two halves of each head by the angles of its token's position (RoPE, Su et al., 2021).

    Args:
        queries, keys: ``[num_tokens, heads, head_dim]``; the values of a head are contiguous.
        cosines, sines: contiguous ``[num_tokens, head_dim]``.

    Returns:
        New queries and keys of the same shapes, contiguous.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    new_queries = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    new_keys = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    if not num_tokens:
        return new_queries, new_keys
    block_d = triton.next_power_of_2(head_dim // 2)
    most_heads = triton.next_power_of_2(max(num_heads, num_kv_heads))
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        rotate_kernel[(num_tokens, 2)](
            new_queries,
            new_keys,
            queries,
            keys,
            cosines,
            sines,
            num_heads,
            num_kv_heads,
            *queries.stride()[:2],
            *keys.stride()[:2],
            HALF=head_dim // 2,
            BLOCK_D=block_d,
            BLOCK_H=min(most_heads, max(_VALUES_PER_PROGRAM // block_d, 1)),
            num_warps=4,
        )
    return new_queries, new_keys
