"""Writes tokens into blocks, and copies whole blocks, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from quire.kernels.cpu.intrinsics import bits_of_float
from quire.kernels.cpu.kernel_cache import stored_njit
from quire.kernels.quantization import KV_FORMATS, LOWEST_MAGNITUDE

Array = np.ndarray[Any, np.dtype[Any]]

_LOWEST = np.float32(LOWEST_MAGNITUDE)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write keys and values into their slots, on the CPU; see ``ops.write_kv``."""
    slots = slot_mapping.numpy()
    latent_dim = value.shape[-1]
    if kv_layer.shape[1] == 2:
        vectors, stored = (key, value), kv_layer.unbind(1)
    else:
        vectors = (value, key[..., latent_dim:])
        stored = (kv_layer[:, 0, ..., :latent_dim], kv_layer[:, 0, ..., latent_dim:])
    if kv_scales is None:
        _write(*map(_bits, vectors), *map(_bits, stored), slots)
        return
    per_magnitude = np.float32(KV_FORMATS[kv_layer.dtype].scale_per_magnitude)
    is_integer = kv_layer.dtype == torch.int8
    for index in range(2):
        _quantize(
            vectors[index].float().numpy(),
            stored[index].view(torch.uint8).numpy(),
            kv_scales.numpy()[:, index],
            slots,
            per_magnitude,
            is_integer,
        )


def copy_blocks(blocks: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks within a tensor, on the CPU; see ``ops.copy_blocks``."""
    blocks.index_copy_(0, pairs[:, 1], blocks.index_select(0, pairs[:, 0]))


def gather_blocks(blocks: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy blocks into a contiguous tensor, on the CPU; see ``ops.gather_blocks``."""
    torch.index_select(blocks, 0, ids, out=out)


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy blocks out of a contiguous tensor, on the CPU; see ``ops.scatter_blocks``."""
    blocks.index_copy_(0, ids, staging)


def _bits(tensor: torch.Tensor) -> Array:
    """Return a view with a dtype that Numba can copy: NumPy has neither bfloat16 nor e4m3."""
    bits = {2: torch.uint16, 1: torch.int8 if tensor.dtype == torch.int8 else torch.uint8}
    view: Array = (tensor if tensor.dtype == torch.float32 else tensor.view(bits[tensor.itemsize])).numpy()
    return view


@stored_njit
def _write(first: Array, second: Array, first_stored: Array, second_stored: Array, slots: Array) -> None:
    """Write two vectors of each token and head into ``[num_blocks, heads, block_size, size]`` each."""
    block_size = first_stored.shape[2]
    for token in range(slots.shape[0]):
        if slots[token] < 0:
            continue
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(first_stored.shape[1]):
            for d in range(first_stored.shape[3]):
                first_stored[block, head, offset, d] = first[token, head, d]
            for d in range(second_stored.shape[3]):
                second_stored[block, head, offset, d] = second[token, head, d]


@stored_njit
def _quantize(
    vectors: Array,
    stored: Array,
    scales: Array,
    slot_mapping: Array,
    per_magnitude: np.float32,
    is_integer: bool,
) -> None:
    """Write ``[num_tokens, heads, head_dim]`` into 8-bit ``[num_blocks, heads, block_size, head_dim]``."""
    block_size = stored.shape[2]
    for token in range(slot_mapping.shape[0]):
        if slot_mapping[token] < 0:
            continue
        block, offset = slot_mapping[token] // block_size, slot_mapping[token] % block_size
        for head in range(stored.shape[1]):
            scale = scales[block, head : head + 1]
            target = stored[block, head, offset]
            quantize_vector(vectors[token, head], target, scale, offset, per_magnitude, is_integer)


@njit(nogil=True)
def quantize_vector(
    vector: Array, stored: Array, scale: Array, offset: int, per_magnitude: np.float32, is_integer: bool
) -> None:
    """Write one token of one head into an 8-bit block; the token in slot 0 sets the block's scale.

    Args:
        vector: float32 ``[head_dim]``.
        stored: uint8 ``[head_dim]``, the bits of int8 or e4m3 numbers.
        scale: float32 ``[1]``, the scale of the block and head.
        offset: the token's slot.
        per_magnitude: the scale of a block whose first token has a magnitude of 1.
        is_integer: whether the numbers are int8.
    """
    if offset == 0:
        magnitude = np.float32(0.0)
        for d in range(vector.shape[0]):
            magnitude = max(magnitude, abs(vector[d]))
        scale[0] = max(magnitude, _LOWEST) * per_magnitude
    for d in range(vector.shape[0]):
        x = np.float32(vector[d] / scale[0])
        stored[d] = np.uint8(_int8(x)) if is_integer else _e4m3(x)


@njit(nogil=True)
def _int8(x: np.float32) -> np.int8:
    """Round to int8, half to even and saturating."""
    return np.int8(np.rint(min(max(x, np.float32(-127.0)), np.float32(127.0))))


@njit(nogil=True)
def _e4m3(x: np.float32) -> np.uint8:
    """Round to e4m3, half to even and saturating."""
    sign = np.uint8(128) if x < 0 else np.uint8(0)
    magnitude = min(abs(x), np.float32(448.0))
    if magnitude < np.float32(0.015625):
        return np.uint8(np.int32(np.rint(magnitude * np.float32(512.0)))) | sign
    # e4m3 has 4 exponent bits with bias 7 (float32: 8 with bias 127) and 3 mantissa bits (float32: 23).
    bits = bits_of_float(magnitude)
    return np.uint8(((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)) | sign
