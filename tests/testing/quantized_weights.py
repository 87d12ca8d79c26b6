"""Packs weights [outputs, inputs] as the writers of quantized checkpoints do.

Each function returns the stored tensors by the endings of their names, and the weight in float32 that they
stand for. Their tensors have the bytes that auto-gptq 0.7.1, AutoAWQ 0.2.9 and compressed-tensors 0.20 write.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""The outputs that AWQ packs into a word, in the order of its bits."""
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class Quantized(NamedTuple):
    """The stored tensors of a weight, and the weight that they stand for."""

    stored: dict[str, torch.Tensor]
    weight: torch.Tensor


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned integers as int32 words along the last dimension, the first in the lowest bits."""
    words: torch.Tensor = values.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32)


class _Codes(NamedTuple):
    codes: torch.Tensor
    """[outputs, inputs]."""
    zeros: torch.Tensor
    """[outputs, groups]."""
    scales: torch.Tensor
    """[outputs, groups], float16."""
    weight: torch.Tensor


def _encode(weight: torch.Tensor, bits: int, groups: torch.Tensor, is_symmetric: bool) -> _Codes:
    num_groups = int(groups.max()) + 1
    middle, most = 1 << bits - 1, (1 << bits) - 1
    members = [weight[:, groups == group] for group in range(num_groups)]
    scales = torch.stack([each.abs().amax(1) / middle for each in members], dim=1).half()
    zeros = torch.full(scales.shape, middle)
    if not is_symmetric:
        zeros += torch.arange(zeros.numel()).reshape(zeros.shape) % 3 - 1
    zeros_of_inputs, scales_of_inputs = zeros[:, groups], scales[:, groups].float()
    codes = ((weight / scales_of_inputs).round() + zeros_of_inputs).clamp(0, most).long()
    return _Codes(codes, zeros, scales, (codes - zeros_of_inputs).float() * scales_of_inputs)


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    group_size: int = 32,
    *,
    version: int = 1,
    is_symmetric: bool = False,
    groups: torch.Tensor | None = None,
) -> Quantized:
    """Pack a weight as GPTQ; ``groups`` names the group of each input, as ``desc_act`` does."""
    if groups is None:
        groups = torch.arange(weight.shape[1]) // group_size
    each = _encode(weight, bits, groups, is_symmetric)
    stored = {
        ".qweight": pack(each.codes, bits).t(),
        ".qzeros": pack(each.zeros.t() - int(version == 1), bits),
        ".scales": each.scales.t(),
        ".g_idx": groups.int(),
    }
    return Quantized(stored, each.weight)


def awq(weight: torch.Tensor, group_size: int = 32) -> Quantized:
    """Pack a weight with 4 bits in AWQ's order of gemm."""
    each = _encode(weight, 4, torch.arange(weight.shape[1]) // group_size, is_symmetric=False)

    def reorder(values: torch.Tensor) -> torch.Tensor:
        return pack(values.t().unflatten(1, (-1, 8))[..., AWQ_COLUMNS].flatten(1), 4)

    stored = {".qweight": reorder(each.codes), ".qzeros": reorder(each.zeros), ".scales": each.scales.t()}
    return Quantized(stored, each.weight)


def compressed_integers(
    weight: torch.Tensor,
    bits: int = 4,
    group_size: int = 32,
    *,
    is_symmetric: bool = True,
    groups: torch.Tensor | None = None,
) -> Quantized:
    """Pack a weight in compressed-tensors' format ``pack-quantized``; ``groups`` as for ``gptq``."""
    regular = torch.arange(weight.shape[1]) // group_size
    each = _encode(weight, bits, regular if groups is None else groups, is_symmetric)
    stored = {
        ".weight_packed": pack(each.codes, bits),
        ".weight_scale": each.scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if groups is not None:
        stored[".weight_g_idx"] = groups.int()
    if not is_symmetric:
        stored[".weight_zero_point"] = pack(each.zeros.t(), bits).t()
    return Quantized(stored, each.weight)


def scaled(
    weight: torch.Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    ending: str = "_scale",
    scale_dtype: torch.dtype = torch.float32,
) -> Quantized:
    """Store a weight as FP8 or int8, with one scale for each block of outputs and inputs."""
    rows, columns = weight.shape
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 127
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = (tiles.abs().amax((1, 3)) / largest).to(scale_dtype)
    spread = scales.float().kron(torch.ones(block))[:rows, :columns]
    values = (weight / spread).clamp(-largest, largest)
    codes = (values if dtype.is_floating_point else values.round()).to(dtype)
    return Quantized({".weight": codes, f".weight{ending}": scales}, codes.float() * spread)


def mxfp4(weight: torch.Tensor) -> Quantized:
    """Store weights [experts, inputs, outputs] as MXFP4, in blocks of 32 inputs."""
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    values = blocks / exponents.exp2().unsqueeze(-1)
    codes = (values.abs().unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1)
    signs = 1 - 2 * (values < 0).float()
    rounded = torch.tensor(E2M1)[codes] * signs * exponents.exp2().unsqueeze(-1)
    nibbles = (codes + 8 * (values < 0)).to(torch.uint8)
    stored = {
        "_blocks": nibbles[..., ::2] | nibbles[..., 1::2] << 4,
        "_scales": (exponents + 127).to(torch.uint8),
    }
    return Quantized(stored, rounded.flatten(2).transpose(1, 2))


def save_quantized(
    plain: Path,
    quantized: Path,
    configuration: dict[str, Any],
    quantize: Callable[[torch.Tensor], Quantized],
    layers: str = "_proj",
    left_out: str = "layers.1.self_attn.k_proj",
) -> None:
    """Save a model with quantized weights, and put the weights that these stand for into the plain model.

    Args:
        plain: the folder of a model; it is changed.
        quantized: the folder to create.
        configuration: the ``quantization_config``.
        quantize: packs a weight.
        layers: the name of each weight to quantize has this.
        left_out: the names of other weights have this.
    """
    shutil.copytree(plain, quantized)
    settings = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(settings | {"quantization_config": configuration}))
    stored: dict[str, torch.Tensor] = {}
    weights = load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        if layers in name and weight.ndim > 1 and "bias" not in name and left_out not in name:
            parts, weights[name] = quantize(weight)
            stored |= {name.removesuffix(".weight") + ending: part for ending, part in parts.items()}
        else:
            stored[name] = weight
    for folder, tensors in ((plain, weights), (quantized, stored)):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
