"""The memory behind the block pool: one tensor with a contiguous range of bytes for each block."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from quire.engine.kv_cache.shared_memory import SharedMemory
from quire.kernels import ops
from quire.kvindex.kv_layout import KvShape

Pairs = Sequence[tuple[int, int]]
Buffer = bytes | memoryview


class KvMemory:
    """KV blocks as ``[num_blocks, num_layers, num_parts, num_kv_heads, block_size, head_dim]``.

    On a GPU, ``read`` and ``write`` run on a separate stream, concurrently with the step. Copies between
    the GPU and pinned host memory use this stream too, and a step waits only for the blocks that it needs.

    Args:
        shared: CPU memory for the blocks that other processes may map; None means private memory.
        own_heads: the KV heads that this process computes, if a model is divided among processes that share
            the blocks; None means all.

    Attributes:
        layers: for each layer, its part of all blocks, with the own heads only.
        scales: for each layer, float32 ``[num_blocks, 2, num_own_heads]``; None if blocks have no scales.
        descriptor: file descriptor by which other processes map the blocks; None if they cannot.
    """

    def __init__(
        self,
        shape: KvShape,
        num_blocks: int,
        device: torch.device,
        *,
        is_pinned: bool = False,
        shared: SharedMemory | None = None,
        own_heads: range | None = None,
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = device
        self.descriptor = None if shared is None else shared.descriptor
        size = (num_blocks, shape.block_bytes)
        if shared is None:
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        else:
            self._bytes = shared.bytes.view(size)
        self.blocks = (
            self._bytes[:, : shape.vector_bytes]
            .view(getattr(torch, shape.dtype))
            .view(
                num_blocks,
                shape.num_layers,
                shape.num_parts,
                shape.num_kv_heads,
                shape.block_size,
                shape.head_dim,
            )
        )
        heads = slice(None) if own_heads is None else slice(own_heads.start, own_heads.stop)
        self.layers = list(self.blocks[:, :, :, heads].unbind(1))
        self.scales: list[torch.Tensor | None] = [None] * shape.num_layers
        self._all_scales: torch.Tensor | None = None
        if shape.is_quantized:
            stored = self._bytes[:, shape.scales].view(torch.float32)
            self._all_scales = stored.view(num_blocks, shape.num_layers, 2, shape.num_kv_heads)
            self.scales = list(self._all_scales[:, :, :, heads].unbind(1))
        self._stream = _new_stream(device) if device.type == "cuda" else None
        self._hold_others()

    def vectors(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the dequantized content of some blocks: shaped like ``blocks``, in float32."""
        vectors = torch.stack([self.blocks[block_id] for block_id in block_ids]).float()
        if self._all_scales is not None:
            vectors *= self._all_scales[list(block_ids)][..., None, None]
        return vectors

    @property
    def address(self) -> int:
        """Address of the first block in this process, or on its GPU."""
        return self._bytes.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._bytes.nbytes

    def read(self, block_id: int) -> bytes:
        """Return a copy of a block's bytes.

        This is safe during a step if the block is sealed or no sequence computes it.
        """
        with self._beside_the_step():
            return self._bytes[block_id].cpu().numpy().tobytes()

    def write(self, block_id: int, payload: Buffer) -> Buffer:
        """Overwrite a block's bytes. During a step this is safe if no sequence in the batch reads the block.

        The copy releases the GIL. The result is a view of the block's bytes on the CPU, and the payload on a
        GPU.

        Raises:
            ValueError: the payload is not one block long, or a scale in it is not a positive number.
        """
        if len(payload) != self.shape.block_bytes:
            raise ValueError(f"a block has {self.shape.block_bytes} bytes, got {len(payload)}")
        if self.shape.is_quantized:
            self._check_scales(payload)
        if self._stream is None:
            copied = self._bytes[block_id].numpy()
            copied[:] = np.frombuffer(payload, dtype=np.uint8)
            return copied.data
        with self._beside_the_step():
            self._bytes[block_id].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            self._stream.synchronize()
        return payload

    def _check_scales(self, payload: Buffer) -> None:
        """Raise ValueError unless each scale of a block, a divisor, is a positive normal number."""
        scales = np.frombuffer(payload[self.shape.scales], np.float32)
        if not (np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)).all():
            raise ValueError("a stored scale of the block is not a positive number")

    def payload(self, block_id: int) -> memoryview:
        """Return the bytes of a block, not a copy of them; only for memory on the CPU."""
        return self._bytes[block_id].numpy().data

    def payload_or_copy(self, block_id: int) -> Buffer:
        """Return a block's bytes: a view on the CPU, a copy on a GPU. ``read`` says when this is safe."""
        return self.payload(block_id) if self._stream is None else self.read(block_id)

    def copies_event(self) -> torch.cuda.Event | None:
        """Return an event that occurs when all queued copies to and from the host are complete.

        On the CPU it is None, since each copy is complete when its call returns.
        """
        return None if self._stream is None else self._stream.record_event()

    def copy_within(self, pairs: Pairs) -> None:
        """Copy whole blocks, given as (from, to), all at the same time."""
        if pairs:
            ops.copy_blocks(self._bytes, torch.tensor(pairs, device=self.device))
            self._hold_others()

    def copy_out(self, host: KvMemory, pairs: Pairs) -> None:
        """Copy whole blocks, given as (block, host block), to host memory before later steps change them."""
        if not pairs:
            return
        block_ids, host_ids = torch.tensor(pairs).unbind(1)
        staging = self._bytes.new_empty((len(pairs), self.shape.block_bytes))
        ops.gather_blocks(self._bytes, block_ids.to(self.device), staging)
        if self._stream is None:
            ops.scatter_blocks(staging, host_ids, host._bytes)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with self._beside_the_step():
            for row, host_id in zip(staging, host_ids.tolist(), strict=True):
                host._bytes[host_id].copy_(row, non_blocking=True)
        staging.record_stream(self._stream)

    def copy_in(self, host: KvMemory, pairs: Pairs) -> None:
        """Copy whole blocks, given as (host block, block), from host memory before later steps read them."""
        if not pairs:
            return
        host_ids, block_ids = torch.tensor(pairs).unbind(1)
        staging = self._bytes.new_empty((len(pairs), self.shape.block_bytes))
        if self._stream is None:
            ops.gather_blocks(host._bytes, host_ids, staging)
        else:
            # The step may still read an earlier tensor at the same address as the staging memory.
            self._stream.wait_stream(torch.cuda.current_stream())
            with self._beside_the_step():
                for row, host_id in zip(staging, host_ids.tolist(), strict=True):
                    row.copy_(host._bytes[host_id], non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
        ops.scatter_blocks(staging, block_ids.to(self.device), self._bytes)
        self._hold_others()

    def _hold_others(self) -> None:
        """Let reads and writes on the separate stream wait for the copies made so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _beside_the_step(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
