"""A tensor that is read when transformers needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed, like a slice of safetensors."""

    def __init__(self, read: Callable[[str, None], torch.Tensor], name: str) -> None:
        self._read, self._name = read, name

    def __getitem__(self, indices: Any) -> torch.Tensor:
        return self._read(self._name, None)[indices]
