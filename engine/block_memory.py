"""The memory of KV blocks as the engine and the transfers see it, wherever the bytes lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quire.kvindex.kv_layout import KvShape

if TYPE_CHECKING:
    from quire.engine.kv_memory import KvMemory

Pairs = Sequence[tuple[int, int]]
Buffer = bytes | memoryview


class BlockMemory(ABC):
    """KV blocks that a model's steps read and write, and that can be moved as whole blocks.

    Attributes:
        shape: the shape of a whole block.
        num_blocks: number of blocks.
        device: where the steps run.
        layers: for each layer, its part of all blocks, with the KV heads that this process computes.
        scales: for each layer, float32 ``[num_blocks, 2, num_own_heads]``; None if blocks have no scales.
        descriptor: file descriptor by which other processes map the blocks; None if they cannot.
    """

    shape: KvShape
    num_blocks: int
    device: torch.device
    layers: list[torch.Tensor]
    scales: list[torch.Tensor | None]
    descriptor: int | None

    @abstractmethod
    def vectors(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the dequantized content of some blocks, in float32.

        It is ``[len(block_ids), num_layers, 2, num_kv_heads, block_size, head_dim]``.
        """

    @abstractmethod
    def write(self, block_id: int, payload: Buffer) -> Buffer:
        """Overwrite a block's bytes. This is safe during a step if no sequence in the batch reads the block.

        Returns the bytes that were written, as far as they can be read again at once.

        Raises:
            ValueError: the payload is not one block long, or a scale in it is not a positive number.
        """

    @abstractmethod
    def payload_or_copy(self, block_id: int) -> Buffer:
        """Return the bytes of a block: themselves if they can be read in place, else a copy.

        This is safe during a step if the block is sealed or no sequence computes it.
        """

    @abstractmethod
    def copies_event(self) -> torch.cuda.Event | None:
        """Return an event that occurs when all copies to and from the host so far are made.

        It is None where each copy is complete when its call returns.
        """

    @abstractmethod
    def copy_within(self, pairs: Pairs) -> None:
        """Copy whole blocks, given as (from, to), all at the same time."""

    @abstractmethod
    def copy_out(self, host: KvMemory, pairs: Pairs) -> None:
        """Copy whole blocks, given as (block, host block), to host memory before later steps change them."""

    @abstractmethod
    def copy_in(self, host: KvMemory, pairs: Pairs) -> None:
        """Copy whole blocks, given as (host block, block), from host memory before later steps read them."""
