"""Paged attention for transformers models, through their attention interface.

A model built with ``attn_implementation="quire"`` calls ``attend`` in every layer. The model's forward call
gets the step's block tables and the KV memory as keyword arguments, so there is no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from quire.engine.model.layers.latent_attention import latent_expansion
from quire.engine.model.states import States
from quire.kernels import ops
from quire.kernels.cpu.recurrence import Recurrence
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.short_convolution import Convolution, short_convolution
from quire.kernels.torch_functions import without_replacements

IMPLEMENTATION = "quire"
Attend = Callable[..., torch.Tensor]
"""Attention of a layer: returns ``[1, num_tokens, num_heads, head_dim]`` for ``[1, num_heads, num_tokens,
head_dim]`` queries, keys and values, perhaps a mask, and options of the attention interface."""


class PagedStep(NamedTuple):
    """Arguments of the attention layers in one forward call.

    Attributes:
        metadata: the sequences of the step, and the slots of their new tokens.
        layers: KV blocks of each layer.
        scales: scales of each layer's 8-bit blocks; None for other dtypes.
        numbers: the numbers of the calls of attention, of which each takes the next. They are those of
            ``layers``, since a layer has KV blocks for each of its calls in a step.
        frames: for each layer, its frame of a block.
        states: the states of layers that have one.
    """

    metadata: AttentionMetadata
    layers: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    numbers: Iterator[int]
    frames: Sequence[int]
    states: States | None

    def next_call(
        self, module: torch.nn.Module
    ) -> tuple[AttentionMetadata, torch.Tensor, torch.Tensor | None]:
        """Return the sequences, KV blocks and scales of a module's next call of attention."""
        number = next(self.numbers)
        if number not in module.kv_layers:  # type: ignore[operator]
            raise RuntimeError(f"{type(module).__name__} calls attention in another order than at load")
        return self.metadata.of_frame(self.frames[number]), self.layers[number], self.scales[number]


@without_replacements
def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: PagedStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_chunked: bool = False,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    convolution: Convolution | None = None,
    recurrence: Recurrence | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the new keys and values into their blocks, and attend over all blocks of each sequence.

    A layer with a short convolution gives its inputs as queries, and half of them each as keys and values.

    Args:
        query: ``[1, num_heads, num_tokens, head_dim]``, the packed new tokens of all sequences.
        key: ``[1, num_kv_heads, num_tokens, head_dim]``; with latent attention ``[1, 1, num_tokens, size]``,
            rows of a latent and a rotated key.
        value: like ``key``, perhaps with another ``head_dim``; with latent attention, the latents.

    Returns:
        The output ``[1, num_tokens, num_heads, head_dim of value]``, and None for the attention weights.
    """
    if paged_step is None:
        raise RuntimeError(f"{type(module).__name__} did not pass paged_step on; this model cannot be served")
    if recurrence is not None:
        return _advance_states(module, query, key, paged_step, recurrence), None
    metadata, kv_layer, kv_scales = paged_step.next_call(module)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    expansion, value_dim = latent_expansion(module), value.shape[-1]
    if expansion is None:
        query, key, value = _padded(query, key, value)
        kv_layer, kv_scales = _own_part(kv_layer, kv_scales, key.shape[1], key.shape[-1])
    queries = query[0].transpose(0, 1)
    ops.write_kv(key[0].transpose(0, 1), value[0].transpose(0, 1), kv_layer, metadata.slot_mapping, kv_scales)
    if convolution is not None:
        return short_convolution(queries, kv_layer, metadata, convolution, kv_scales)[None], None
    output = ops.paged_attention(
        queries if expansion is None else expansion.queries(queries),
        kv_layer,
        metadata,
        scale=scaling,
        sliding_window=sliding_window,
        is_chunked=is_chunked,
        logit_softcap=softcap,
        sinks=s_aux,
        alibi_slopes=alibi_slopes,
        kv_scales=kv_scales,
        latent_dim=None if expansion is None else expansion.latent_dim,
        arithmetic=module.arithmetic,  # type: ignore[arg-type]
    )
    return (output[..., :value_dim] if expansion is None else expansion.values(output))[None], None


def _advance_states(
    module: torch.nn.Module,
    inputs: torch.Tensor,
    steps: torch.Tensor,
    paged_step: PagedStep,
    recurrence: Recurrence,
) -> torch.Tensor:
    """Run the recurrence of a layer with a state.

    Such a layer gives ``[1, num_tokens, num_channels]`` inputs as queries and values, and its steps as keys.
    """
    assert paged_step.states is not None, "the blocks have no room for states"
    places = paged_step.states.places(module.state_number)  # type: ignore[arg-type]
    return recurrence.advance(inputs[0], steps[0], paged_step.metadata, places)[None]


def _padded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Append zeros to heads until those of keys and of values have one size."""
    if key.shape[-1] == value.shape[-1]:
        return query, key, value
    size = max(key.shape[-1], value.shape[-1])
    return tuple(torch.nn.functional.pad(each, (0, size - each.shape[-1])) for each in (query, key, value))


def _own_part(
    kv_layer: torch.Tensor, scales: torch.Tensor | None, num_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the beginning of each block's part of a layer whose heads are not shaped like the largest."""
    num_blocks, _, _, block_size, _ = kv_layer.shape
    shape = (num_blocks, 2, num_heads, block_size, head_dim)
    if kv_layer.shape == shape:
        return kv_layer, scales
    strides = (*kv_layer.stride()[:2], block_size * head_dim, head_dim, 1)
    return kv_layer.as_strided(shape, strides), None if scales is None else scales[:, :, :num_heads]


def pass_step_to(model: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
    """Pass the step of a model's call to attention layers whose callers drop it."""
    steps: list[object] = [None]

    def keep(_: object, __: object, options: dict[str, Any]) -> None:
        steps[0] = options.get("paged_step")

    def add(_: object, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**options, "paged_step": options.get("paged_step") or steps[0]}

    model.register_forward_pre_hook(keep, with_kwargs=True)
    for layer in layers:
        layer.register_forward_pre_hook(add, with_kwargs=True)


def register() -> None:
    """Register ``attn_implementation="quire"`` with transformers; calling this again does nothing.

    No mask function is registered. The kernel derives causality and windows from positions. With a mask
    function, even one that returns no mask, transformers would look at the positions, and the host would
    have to wait for the GPU.
    """
    AttentionInterface.register(IMPLEMENTATION, attend)
