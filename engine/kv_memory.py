"""The memory behind the block pool: one tensor, one contiguous run of bytes for each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one block holds: keys and values of all layers for ``block_size`` tokens."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype.itemsize


class KvMemory:
    """KV blocks as ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``."""

    def __init__(self, shape: KvShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.blocks = torch.zeros(
            (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        self.layers = [self.blocks[:, layer] for layer in range(shape.num_layers)]
        self._bytes = self.blocks.view(torch.uint8).view(num_blocks, shape.block_bytes)

    def read(self, block_id: int) -> bytes:
        """Copy a block out. Safe beside a running step if the block is sealed or no sequence computes it."""
        return self._bytes[block_id].cpu().numpy().tobytes()

    def write(self, block_id: int, payload: bytes) -> None:
        """Copy a block in. Safe beside a running step if no sequence in the batch reads the block.

        Raises:
            ValueError: the payload is not one block long.
        """
        if len(payload) != self.shape.block_bytes:
            raise ValueError(f"a block has {self.shape.block_bytes} bytes, got {len(payload)}")
        if self._bytes.is_cpu:
            self._bytes[block_id].numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        else:
            self._bytes[block_id].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def copy_from(self, source: KvMemory, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (block of source, block of this), all at once."""
        if not pairs:
            return
        ids = torch.tensor(pairs)
        blocks = source._bytes[ids[:, 0].to(source._bytes.device)]
        self._bytes[ids[:, 1].to(self._bytes.device)] = blocks.to(self._bytes.device)
