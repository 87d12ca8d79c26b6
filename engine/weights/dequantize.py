"""Computes the weights that the stored tensors of a quantized checkpoint stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.engine.weights.quantization import Quantization

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place of each of 8 outputs in a word of AWQ."""
_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


class WrongPartError(ValueError):
    """A part of a quantized tensor has the wrong type, shape or values."""

    def __init__(self, role: str, problem: str) -> None:
        super().__init__(problem)
        self.role = role


class Codes(NamedTuple):
    """The stored values of a weight: it is ``(values - zeros) * scales``.

    Attributes:
        values: ``[..., outputs, inputs]``, of 8 bits or as uint8 of fewer bits.
        scales: float32, which can be broadcast to the shape of the values.
        zeros: the zero points, likewise, or None.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def has_scales_of_rows(self) -> bool:
        """Whether all inputs of an output share a scale."""
        return self.scales.ndim == 0 or self.scales.shape[-1] == 1


def dequantize(quantization: Quantization, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight in float32: the product of its values, less zero points, and their scales.

    The arguments and errors are those of ``read_codes``.
    """
    if quantization.method == "mxfp4":
        return _mxfp4(parts)
    codes = read_codes(quantization, parts)
    values = codes.values.float()
    if codes.zeros is not None:
        values -= codes.zeros
    return values.mul_(codes.scales)


def read_codes(quantization: Quantization, parts: dict[str, torch.Tensor]) -> Codes:
    """Return the codes of a weight of any format but MXFP4.

    Args:
        quantization: how the checkpoint is quantized.
        parts: the stored tensors. ``weight`` and ``scales`` must exist, and ``zeros``, ``groups`` and
            ``shape`` where the format has them.

    Raises:
        WrongPartError: a part has the wrong type, shape or values.
    """
    if not parts["scales"].is_floating_point():
        raise WrongPartError("scales", f"is {parts['scales'].dtype}, not of floating point")
    if quantization.method in ("gptq", "awq"):
        return _grouped(quantization, parts)
    return _scaled(parts, quantization.block)


def _grouped(quantization: Quantization, parts: dict[str, torch.Tensor]) -> Codes:
    """Return a weight [outputs, inputs] of GPTQ or AWQ, whose tensors are stored transposed."""
    bits, is_awq = quantization.bits, quantization.method == "awq"
    packed, zeros = parts["weight"], parts["zeros"]
    _check_dimensions(packed, 2)
    num_rows, num_columns = packed.shape
    per_word = 32 // bits
    inputs, outputs = (num_rows, num_columns * per_word) if is_awq else (num_rows * per_word, num_columns)
    group_size = inputs if quantization.group_size == -1 else quantization.group_size
    num_groups = -(-inputs // group_size)
    _check("scales", parts["scales"], (num_groups, outputs))
    _check("zeros", zeros, (num_groups, -(-outputs // per_word)), torch.int32)
    groups = parts.get("groups")
    if groups is None:
        groups = torch.arange(inputs) // group_size
    _check_groups(groups, inputs, num_groups)
    middle = 1 << bits - 1
    if quantization.stores_zeros_less_1:
        # The sum carries from one zero point to the next, as the difference did that the writer computed.
        zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))
    codes = unpack(packed if is_awq else packed.t(), bits)
    zeros = unpack(zeros, bits)
    if is_awq:
        codes, zeros = (each.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1) for each in (codes, zeros))
        codes = codes.t()
    zeros = zeros[:, :outputs].t()
    if quantization.is_symmetric and (zeros == zeros[0, 0]).all() and abs(int(zeros[0, 0]) - middle) == 1:
        # Some files name the other version than that of the zero points in them.
        zeros = torch.full_like(zeros, middle)
    scales = parts["scales"].float().t().contiguous()
    return Codes(codes, scales.index_select(1, groups), zeros.float().index_select(1, groups))


def _mxfp4(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the weights [experts, inputs, outputs] of blocks [experts, outputs, groups, 16]."""
    scales = scales_of_mxfp4(parts)
    blocks = parts["weight"]
    pairs = torch.tensor([[low, high] for high in _E2M1 for low in _E2M1])
    values = pairs.index_select(0, blocks.flatten().int()).view(*blocks.shape[:3], 32)
    return values.mul_(scales.unsqueeze(-1)).flatten(2).transpose(1, 2)


def scales_of_mxfp4(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return float32 scales [experts, outputs, groups]; both stored tensors have the right types and shapes.

    Raises:
        WrongPartError: one has not.
    """
    blocks, scales = parts["weight"], parts["scales"]
    _check_dimensions(blocks, 4)
    _check("weight", blocks, (*blocks.shape[:3], 16), torch.uint8)
    _check("scales", scales, blocks.shape[:3], torch.uint8)
    return torch.exp2(scales.float() - 127)


def _scaled(parts: dict[str, torch.Tensor], block: tuple[int, int] | None) -> Codes:
    """Return a weight [..., outputs, inputs] of FP8 or compressed-tensors."""
    weight, zeros, groups = parts["weight"], parts.get("zeros"), parts.get("groups")
    if "shape" in parts:
        weight, zeros = _unpack_compressed(parts)
    if weight.ndim < 2:
        raise WrongPartError("weight", f"has the shape {tuple(weight.shape)}, not [outputs, inputs]")
    if groups is not None:
        _check_groups(groups, weight.shape[1], parts["scales"].shape[-1])
    if zeros is not None:
        zeros = _spread("zeros", zeros, weight.shape, block, groups)
    return Codes(weight, _spread("scales", parts["scales"], weight.shape, block, groups), zeros)


def _unpack_compressed(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values [..., outputs, inputs] and zero points [..., outputs, groups] of packed integers."""
    packed, scales, zeros = parts["weight"], parts["scales"], parts.get("zeros")
    shape = parts["shape"].tolist()
    words = packed.shape[-1] if packed.ndim else 0
    possible = [bits for bits in (2, 4, 8) if shape and -(-shape[-1] * bits // 32) == words]
    if len(possible) != 1:
        raise WrongPartError("weight", f"has the shape {tuple(packed.shape)} for weights of shape {shape}")
    bits = possible[0]
    _check("weight", packed, (*shape[:-1], words))
    weight = unpack(packed, bits)[..., : shape[-1]]
    if zeros is None:
        return weight, torch.tensor(1 << bits - 1)
    # Zero points are packed along the outputs.
    _check("zeros", zeros, (*shape[:-2], -(-shape[-2] * bits // 32), scales.shape[-1]), torch.int32)
    return weight, unpack(zeros.transpose(-1, -2), bits)[..., : shape[-2]].transpose(-1, -2)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers of 2, 4 or 8 bits that are packed along the last dimension."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    octets = packed.contiguous().view(torch.uint8).unsqueeze(-1)
    return ((octets >> shifts) & (1 << bits) - 1).flatten(-2)


def _spread(
    role: str,
    values: torch.Tensor,
    shape: torch.Size,
    block: tuple[int, int] | None,
    groups: torch.Tensor | None,
) -> torch.Tensor:
    """Return float32 values that can be broadcast to a weight's shape [..., outputs, inputs].

    The values are for the whole weight, or for each output, each group of inputs, or each block.
    """
    values, (*experts, rows, columns) = values.float(), shape
    if values.numel() == 1:
        return values.reshape(())
    if values.shape == shape[:-1]:
        values = values.unsqueeze(-1)
    if block is not None and list(values.shape) == [*experts, -(-rows // block[0]), -(-columns // block[1])]:
        values = values.repeat_interleave(block[0], -2)[..., :rows, :]
        return values.repeat_interleave(block[1], -1)[..., :columns]
    num_groups = values.shape[-1]
    if values.shape[:-1] != shape[:-1] or columns % num_groups:
        raise WrongPartError(role, f"has the shape {tuple(values.shape)} for weights of shape {tuple(shape)}")
    if num_groups == 1:
        return values
    return values.repeat_interleave(columns // num_groups, -1) if groups is None else values[..., groups]


def _check(role: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    if list(tensor.shape) != list(shape):
        raise WrongPartError(role, f"has the shape {tuple(tensor.shape)} instead of {tuple(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise WrongPartError(role, f"is {tensor.dtype} instead of {dtype}")


def _check_dimensions(weight: torch.Tensor, number: int) -> None:
    if weight.ndim != number:
        raise WrongPartError("weight", f"has the shape {tuple(weight.shape)}, not one of {number} dimensions")


def _check_groups(groups: torch.Tensor, inputs: int, num_groups: int) -> None:
    _check("groups", groups, (inputs,))
    if groups.is_floating_point() or groups.min() < 0 or groups.max() >= num_groups:
        raise WrongPartError("groups", f"does not name one of {num_groups} groups for each input")
