"""Packs the stored codes of a quantized weight for the kernels of the CPU, if these can multiply them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from quire.engine.weights.dequantize import Codes, scales_of_mxfp4
from quire.kernels.cpu.intrinsics import GROUP
from quire.kernels.cpu.products.coded_product import E2M1, E4M3, INT4, INT8, UINT4, ZERO_MASK
from quire.kernels.cpu.products.coded_weight import pack_codes
from quire.kernels.cpu.products.integer_product import MOST_INPUTS
from quire.kernels.cpu.products.integer_weight import pack_integers
from quire.kernels.cpu.products.packed_weight import PackedWeight

_NANS_OF_E4M3 = (0x7F, 0xFF)
_MIDDLES = {8: INT4, 128: INT8}
"""Codings whose values are unsigned integers less this zero point."""


def take_part(whole: Any, part: tuple[int, slice] | None) -> torch.Tensor:
    """Return a tensor, or a slice of safetensors, or a part of it along one dimension."""
    if part is None:
        return whole  # type: ignore[no-any-return]
    dimension, indices = part
    return whole[indices] if dimension == 0 else whole[:, indices]  # type: ignore[no-any-return]


def pack(
    codes: Codes, part: tuple[int, slice] | None, dtype: torch.dtype, rounds_inputs: bool
) -> PackedWeight | None:
    """Return a weight, or a part of it along one dimension; None if no kernel can multiply its codes.

    Groups of inputs that share scales must consist of whole groups of the kernels.

    Args:
        codes: the whole weight.
        part: as for ``Checkpoint.read``.
        dtype: the model's dtype.
        rounds_inputs: whether the inputs of products with integers of 8 bits are rounded to 8 bits.
    """
    values = codes.values
    if values.ndim != 2 or values.shape[1] % GROUP:
        return None
    scales, zeros = _by_group(codes.scales, values), _by_group(codes.zeros, values)
    if scales is None or zeros is None:
        return None
    coding = None
    first_zero = int(zeros[0, 0])
    if values.dtype == torch.uint8 and (zeros == first_zero).all() and first_zero in _MIDDLES:
        coding = _MIDDLES[first_zero]
        if coding == INT8:
            values, zeros = (values ^ first_zero).view(torch.int8), zeros - first_zero
        elif values.max() > 15:
            return None
    elif values.dtype == torch.uint8 and values.max() <= 15:
        has_room = not (scales.view(torch.int32) & ZERO_MASK).any()
        are_integers = ((zeros >= 0) & (zeros <= ZERO_MASK) & (zeros == zeros.round())).all()
        coding = UINT4 if has_room and are_integers else None
    elif not zeros.any():
        coding = {torch.int8: INT8, torch.float8_e4m3fn: E4M3}.get(values.dtype)
        if coding == E4M3 and torch.isin(values.view(torch.uint8), torch.tensor(_NANS_OF_E4M3)).any():
            return None
    if coding is None:
        return None
    if part is not None:
        dimension, own = part
        rows, inputs = (own, slice(None)) if dimension == 0 else (slice(None), own)
        if dimension == 1 and (own.start % GROUP or own.stop % GROUP):
            return None
        groups = slice(None) if dimension == 0 else slice(own.start // GROUP, own.stop // GROUP)
        values, scales, zeros = values[rows, inputs], scales[rows, groups], zeros[rows, groups]
    if rounds_inputs and coding == INT8 and codes.has_scales_of_rows and values.shape[1] <= MOST_INPUTS:
        return pack_integers(values, scales[:, 0], dtype)
    return pack_codes(values, scales, zeros if coding == UINT4 else None, coding, dtype)


def pack_mxfp4(parts: dict[str, torch.Tensor], own: slice, dtype: torch.dtype) -> list[PackedWeight]:
    """Return the weights of some experts in MXFP4.

    Raises:
        WrongPartError: a part has the wrong type or shape.
    """
    scales, blocks = scales_of_mxfp4(parts), parts["weight"]
    return [
        pack_codes(torch.stack((each & 15, each >> 4), dim=-1).flatten(1), scale, None, E2M1, dtype)
        for each, scale in zip(blocks[own], scales[own], strict=True)
    ]


def _by_group(numbers: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor | None:
    """Return numbers of inputs for each group of ``GROUP`` inputs; None if they differ within a group."""
    if numbers is None:
        numbers = torch.zeros(())
    groups = numbers.float().expand(values.shape).unflatten(1, (-1, GROUP))
    first = groups[..., 0].contiguous()
    return first if (groups == first.unsqueeze(-1)).all() else None


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory that stands for a packed weight until layers get their weights."""
    return torch.full((1,) * len(shape), torch.nan, dtype=dtype).expand(shape)


def weight_bytes(module: torch.nn.Module, packed: Mapping[str, list[PackedWeight]]) -> int:
    """Return the bytes of a model's weights, some of which are packed."""
    return sum(
        sum(each.panels.nbytes for each in packed[name]) if name in packed else parameter.nbytes
        for name, parameter in module.named_parameters()
    )
