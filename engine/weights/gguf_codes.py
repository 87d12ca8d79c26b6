"""Reads the codes of GGUF's blocks, for products with inputs of 8 bits as llama.cpp makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gguf import GGMLQuantizationType as Kind

from quire.kernels.cpu.products.group_product import Q4, Q4_OFFSET, Q6_HALVES, Q6_OFFSET, Q8


class GroupCodes(NamedTuple):
    """A matrix in codes: the arguments of ``pack_groups``."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    coding: Any


def _halves(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """Return the float16 at a place of each block, ``[rows, blocks, 1]``."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Return the lower halves of all bytes of the last dimension, and then the upper halves."""
    return torch.cat((octets & 15, octets >> 4), dim=-1)


def _bits(octets: torch.Tensor, bits: int, shifts: range) -> torch.Tensor:
    """Return for each shift these bits of all bytes of the last dimension."""
    return torch.cat([octets >> shift & (1 << bits) - 1 for shift in shifts], dim=-1)


def _fifth_bits(blocks: torch.Tensor, place: int) -> torch.Tensor:
    """Return the highest bits of 32 codes of 5 bits, which are in 4 bytes."""
    octets = blocks[..., place : place + 4].unsqueeze(-1)
    return (octets >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2) << 4


def _q4_0(blocks: torch.Tensor) -> GroupCodes:
    return GroupCodes(_nibbles(blocks[..., 2:]), _halves(blocks, 0), None, Q4)


def _q4_1(blocks: torch.Tensor) -> GroupCodes:
    return GroupCodes(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2), Q4_OFFSET)


def _q5_0(blocks: torch.Tensor) -> GroupCodes:
    # Codes less 16 are those of this coding less 32.
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)) + 16
    return GroupCodes(codes, _halves(blocks, 0).expand(-1, -1, 2), None, Q6_HALVES)


def _q5_1(blocks: torch.Tensor) -> GroupCodes:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return GroupCodes(codes, _halves(blocks, 0), _halves(blocks, 2), Q6_OFFSET)


def _q8_0(blocks: torch.Tensor) -> GroupCodes:
    return GroupCodes(blocks[..., 2:] ^ 128, _halves(blocks, 0), None, Q8)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and offsets of 8 groups, whose integers of 6 bits are in 12 bytes."""
    first, second, rest = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    return _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _q4_k(blocks: torch.Tensor) -> GroupCodes:
    return GroupCodes(
        _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))), *_scales_and_minima(blocks), Q4_OFFSET
    )


def _q5_k(blocks: torch.Tensor) -> GroupCodes:
    high = _bits(blocks[..., 16:48], 1, range(8)) << 4
    codes = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2) | high
    return GroupCodes(codes, *_scales_and_minima(blocks), Q6_OFFSET)


def _q6_k(blocks: torch.Tensor) -> GroupCodes:
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2, range(0, 8, 2)) << 4
    scales = blocks[..., 192:208].view(torch.int8) * _halves(blocks, 208)
    return GroupCodes(low | high, scales, None, Q6_HALVES)


_READERS: dict[Kind, tuple[int, Callable[[torch.Tensor], GroupCodes]]] = {
    Kind.Q4_0: (18, _q4_0),
    Kind.Q4_1: (20, _q4_1),
    Kind.Q5_0: (22, _q5_0),
    Kind.Q5_1: (24, _q5_1),
    Kind.Q8_0: (34, _q8_0),
    Kind.Q4_K: (144, _q4_k),
    Kind.Q5_K: (176, _q5_k),
    Kind.Q6_K: (210, _q6_k),
}
"""Bytes of a block, and what reads it."""


def read_group_codes(kind: Kind, rows: torch.Tensor) -> GroupCodes | None:
    """Return the codes of a matrix; None for types that are dequantized.

    Args:
        kind: the type of the matrix.
        rows: its bytes, uint8 ``[out_features, bytes of a row]``.
    """
    if kind not in _READERS:
        return None
    block_bytes, read = _READERS[kind]
    codes, scales, offsets, coding = read(rows.unflatten(1, (-1, block_bytes)))
    return GroupCodes(
        codes.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), coding
    )
