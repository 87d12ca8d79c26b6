"""Compares the attention masks that a model requests from transformers with the masks of paged attention.

Paged attention gets no mask as an argument: a layer attends to every earlier token, or to those in its
window or chunk. Transformers describes a mask by a function of two positions, so the check can cover
positions that no short prompt reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of the indices of batch, head, query and key that returns whether the query sees the key."""

_WINDOWED_LAYERS = {"sliding_attention", "chunked_attention"}


class Window(NamedTuple):
    """Which tokens a token sees.

    Attributes:
        num_tokens: how many tokens it sees, itself included; None means all before it.
        is_chunked: whether it sees its chunk of this size, up to itself.
    """

    num_tokens: int | None
    is_chunked: bool = False

    def __str__(self) -> str:
        if self.num_tokens is None:
            return "all tokens before"
        return f"{'chunks' if self.is_chunked else 'a window'} of {self.num_tokens} tokens"


class OwnMaskError(Exception):
    """A mask was not made by transformers' mask interface, so its mask function is unknown."""


class MaskObserver:
    """A mask implementation for transformers' mask interface that records the mask functions.

    Each mask that it returns contains one number, which identifies the mask function.
    """

    def __init__(self) -> None:
        self._functions: list[MaskFunction] = []

    def __call__(self, *_: Any, mask_function: MaskFunction, **__: Any) -> torch.Tensor:
        """Record a mask function and return its number as a mask ``[1, 1, 1, 1]``."""
        self._functions.append(mask_function)
        return torch.full((1, 1, 1, 1), float(len(self._functions)))

    def function_of(self, mask: object) -> MaskFunction | None:
        """Return the mask function of a mask that attention was given; None if there was no mask.

        Raises:
            OwnMaskError: the model made or changed the mask itself.
        """
        if mask is None:
            return None
        if isinstance(mask, torch.Tensor) and mask.shape == (1, 1, 1, 1):
            number = mask.item()
            if number in range(1, len(self._functions) + 1):
                return self._functions[int(number) - 1]
        raise OwnMaskError("it gives attention masks of its own")


def mask_problem(
    windows: Sequence[Window],
    functions: Sequence[MaskFunction | None],
    layer_types: Sequence[str] | None,
    num_positions: int,
) -> str | None:
    """Describe how a layer's mask differs from its causal window; None if no difference was found.

    Args:
        windows: what each layer sees with paged attention.
        functions: the mask function of each layer; None if attention was given no mask.
        layer_types: the type of each layer in the model's configuration, if it has any.
        num_positions: number of positions that the model has.
    """
    for layer, kind in enumerate(layer_types or ()):
        if kind in _WINDOWED_LAYERS and layer < len(windows) and windows[layer].num_tokens is None:
            return f"layer {layer} is of type {kind!r} and gives attention no window"
    checked: dict[tuple[int, Window], None] = {}
    for layer, (window, function) in enumerate(zip(windows, functions, strict=True)):
        if function is None or (id(function), window) in checked:
            continue
        checked[id(function), window] = None
        differing = _differing_position(function, window, num_positions)
        if differing is not None:
            query, key = differing
            return (
                f"layer {layer} gives attention {window}, but its mask differs where position {query} "
                f"looks at position {key}"
            )
    return None


def _differing_position(function: MaskFunction, window: Window, num_positions: int) -> tuple[int, int] | None:
    """Return positions of a query and a key at which a mask function differs from a causal window, if any."""
    last = num_positions - 1
    size = window.num_tokens
    near = [] if size is None else [size - 1, size, size + 1]
    # The last query reveals each window that is shorter than the model's positions; the others reveal chunks.
    queries = {0, 1, last // 3, last // 2, last - 1, last, *near}
    keys = torch.arange(num_positions)
    zero = torch.zeros((), dtype=torch.long)
    for query in sorted(query for query in queries if 0 <= query <= last):
        expected = keys <= query
        if size is not None:
            expected &= keys >= query - (query % size if window.is_chunked else size - 1)
        seen = torch.as_tensor(function(zero, zero, torch.tensor(query), keys)).expand(num_positions)
        if not torch.equal(seen.bool(), expected):
            return query, int((seen.bool() != expected).nonzero()[0])
    return None
