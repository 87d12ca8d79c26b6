"""Compares the attention masks that a model requests from transformers with the masks of paged attention.

Paged attention gets no mask as an argument: a layer attends to every earlier token, or to those in its
window. Transformers describes a mask by a function of two positions, so the check can cover positions that no
short prompt reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of the indices of batch, head, query and key that returns whether the query sees the key."""

_WINDOWED_LAYERS = {"sliding_attention", "chunked_attention"}


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
    windows: Sequence[int | None],
    functions: Sequence[MaskFunction | None],
    layer_types: Sequence[str] | None,
    num_positions: int,
) -> str | None:
    """Describe how a layer's mask differs from its causal window; None if no difference was found.

    Args:
        windows: number of tokens that each layer sees with paged attention; None means all.
        functions: the mask function of each layer; None if attention was given no mask.
        layer_types: the type of each layer in the model's configuration, if it has any.
        num_positions: number of positions that the model has.
    """
    for layer, kind in enumerate(layer_types or ()):
        if kind in _WINDOWED_LAYERS and layer < len(windows) and windows[layer] is None:
            return f"layer {layer} is of type {kind!r} and gives attention no window"
    checked: dict[tuple[int, int | None], None] = {}
    for layer, (window, function) in enumerate(zip(windows, functions, strict=True)):
        if function is None or (id(function), window) in checked:
            continue
        checked[id(function), window] = None
        differing = _differing_position(function, window, num_positions)
        if differing is not None:
            query, key = differing
            seen = "all tokens before" if window is None else f"a window of {window} tokens"
            return (
                f"layer {layer} gives attention {seen}, but its mask differs where position {query} "
                f"looks at position {key}"
            )
    return None


def _differing_position(
    function: MaskFunction, window: int | None, num_positions: int
) -> tuple[int, int] | None:
    """Return positions of a query and a key at which a mask function differs from a causal window, if any."""
    last = num_positions - 1
    near = [] if window is None else [window - 1, window, window + 1]
    # The last query reveals each window that is shorter than the model's positions; the others reveal chunks.
    queries = {0, 1, last // 3, last // 2, last - 1, last, *near}
    keys = torch.arange(num_positions)
    zero = torch.zeros((), dtype=torch.long)
    for query in sorted(query for query in queries if 0 <= query <= last):
        expected = keys <= query
        if window is not None:
            expected &= keys > query - window
        seen = torch.as_tensor(function(zero, zero, torch.tensor(query), keys)).expand(num_positions)
        if not torch.equal(seen.bool(), expected):
            return query, int((seen.bool() != expected).nonzero()[0])
    return None
