"""Fewer launches on a GPU: norms, gated MLPs and rotations that take one kernel each.

The modules of transformers launch a kernel for each operation, about eight for a norm and ten for a rotation.
A decode step of a small batch takes longer to launch and to drain these than to read the weights. The
replacements round where the modules round. Each is compared with the module that it replaces, on random
inputs, and used only if the results agree.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from quire.engine.model.layers.row_layers import ACTIVATIONS, TOLERANCES, find_rms_norm
from quire.kernels.cpu.rows import Activation, Norm
from quire.kernels.triton import rows
from quire.kernels.triton.rows import GatedKind

_KINDS: dict[Activation | None, GatedKind] = {Activation.SILU: "silu", Activation.GELU_TANH: "gelu_tanh"}
"""The kernel's names of activation functions."""
_ROTATE = "apply_rotary_pos_emb"
"""Name of the function with which the attention modules of transformers rotate queries and keys."""
Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RmsNorm(torch.nn.Module):
    """A norm by the root mean square, as one kernel."""

    def __init__(self, weight: torch.Tensor, shift: float, epsilon: float, kind: Norm) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.float() + shift, requires_grad=False)
        self.epsilon = epsilon
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize each row of ``[..., length]``."""
        return rows.rms_norm(inputs, self.weight, self.epsilon, rounds_first=self.kind == Norm.RMS)


class GatedMlp(torch.nn.Module):
    """``down(activation(gate) * up)``, with one product for gate and up, and one kernel between."""

    def __init__(self, gate_up: torch.Tensor, bias: torch.Tensor | None, kind: GatedKind, down: Any) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(gate_up, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        self.kind = kind
        self.down_proj = down

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[..., hidden_size]`` of ``[..., hidden_size]``."""
        gate_up = torch.nn.functional.linear(inputs, self.gate_up, self.bias)
        outputs: torch.Tensor = self.down_proj(rows.gated_activation(gate_up, self.kind))
        return outputs


def fuse_layers(model: torch.nn.Module) -> None:
    """Replace the norms, gated MLPs and rotations of a model on a GPU."""
    for parent in list(model.modules()):
        _fuse_rotation(parent)
        for name, child in list(parent.named_children()):
            fused = find_rms_norm(child, RmsNorm) or _gated_mlp(child)
            if fused is not None:
                setattr(parent, name, fused)


def _gated_mlp(module: torch.nn.Module) -> GatedMlp | None:
    """Return a gated MLP that is equivalent to a module; None if there is none."""
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    kind = _KINDS.get(ACTIVATIONS.get(type(activation).__name__))
    down: Any = getattr(module, "down_proj", None)
    merged: Any = getattr(module, "gate_up_proj", None)
    pair: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj")]
    parts = pair if merged is None else [merged]
    if kind is None or not all(type(each) is torch.nn.Linear for each in (down, *parts)):
        return None
    weight = torch.cat([each.weight for each in parts])
    biases = [each.bias for each in parts]
    if len({each is None for each in biases}) != 1:
        return None
    bias = None if biases[0] is None else torch.cat(biases)
    fused = GatedMlp(weight, bias, kind, down)
    inputs = _random((8, weight.shape[1]), weight)
    with torch.inference_mode():
        return fused if _is_close(fused(inputs), module(inputs)) else None


def _fuse_rotation(module: torch.nn.Module) -> None:
    """Let an attention module rotate by one kernel, if its own function gives the same.

    Its ``forward`` is copied with another global name; no other module is affected.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTATE not in forward.__code__.co_names:
        return
    original = forward.__globals__.get(_ROTATE)
    weight = next(module.parameters(), None)
    if original is None or weight is None or not _rotates_alike(original, weight):
        return
    names = {**forward.__globals__, _ROTATE: _rotate_or(original)}
    fused = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(fused, module)


def _rotate_or(original: Rotate) -> Rotate:
    """Return a function that rotates by the kernel whatever the kernel can rotate."""

    def rotate(
        query: torch.Tensor,
        key: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        *rest: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # [1, heads, tokens, head_dim] and [1, tokens, rotary_dim]
        tensors = (query, key, cosines, sines)
        kinds = {(each.shape[0], each.shape[-1], each.stride(-1), each.dtype) for each in tensors}
        if rest or options or kinds != {(1, query.shape[-1], 1, query.dtype)}:
            return original(*tensors, *rest, **options)
        rotated = rows.rotate(
            query[0].transpose(0, 1), key[0].transpose(0, 1), cosines[0].contiguous(), sines[0].contiguous()
        )
        return rotated[0].transpose(0, 1)[None], rotated[1].transpose(0, 1)[None]

    return rotate


def _rotates_alike(original: Rotate, weight: torch.Tensor) -> bool:
    query, key = _random((1, 4, 3, 16), weight), _random((1, 2, 3, 16), weight)
    cosines, sines = _random((1, 3, 16), weight), _random((1, 3, 16), weight)
    try:
        expected = original(query, key, cosines, sines)
        got = _rotate_or(original)(query, key, cosines, sines)
    except (TypeError, ValueError, RuntimeError):
        return False  # its arguments are others
    return all(_is_close(*pair) for pair in zip(got, expected, strict=True))


def _is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    difference = (got.float() - expected.float()).abs().max()
    return bool(difference <= TOLERANCES[expected.dtype] * expected.float().abs().max())


def _random(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)
