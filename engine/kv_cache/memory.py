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
FrameTables = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

NO_FRAME = -1


class KvMemory:
    """KV blocks as ``[num_blocks, num_layers, num_parts, num_kv_heads, block_size, head_dim]``.

    Blocks with two parts (see ``KvShape``) lie in frames, for which ``blocks`` and ``layers`` have one entry
    each: ``frame_tables`` names the frames of each block of a pool. In other memory, and if a block is one
    frame, a block's frames follow each other.

    On a GPU, ``read`` and ``write`` run on a separate stream, concurrently with the step. Copies between
    the GPU and pinned host memory use this stream too, and a step waits only for the blocks that it needs.

    Args:
        shared: CPU memory for the blocks that other processes may map; None means private memory.
        own_heads: the KV heads that this process computes, if a model is divided among processes that share
            the blocks; None means all.
        is_pool: whether a pool divides the memory. If blocks have two parts, a pool holds more than
            ``num_blocks`` blocks if some are bare.

    Attributes:
        frame_tables: int32 ``[num_ids, num_frames]``, the frames of the block with each id, and ``NO_FRAME``
            for those that it lacks. The pool writes it. None if a block's frames follow each other.
        frames: for each layer, its frame of a block.
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
        is_pool: bool = True,
    ) -> None:
        self.shape = shape
        frame = self._frame = shape.frame
        num_frames = num_blocks * shape.num_frames
        self.frame_tables: FrameTables | None = None
        if is_pool and shape.window:
            size = (num_frames // shape.lasting_frames, shape.num_frames)
            self.frame_tables = np.full(size, NO_FRAME, dtype=np.int32)
        self.num_blocks = num_blocks
        self.device = device
        self.descriptor = None if shared is None else shared.descriptor
        size = (num_frames, frame.block_bytes)
        if shared is None:
            self._bytes = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=is_pinned)
        else:
            self._bytes = shared.bytes.view(size)
        self.blocks = (
            self._bytes[:, : frame.vector_bytes]
            .view(getattr(torch, frame.dtype))
            .view(
                num_frames,
                frame.num_layers,
                frame.num_parts,
                frame.num_kv_heads,
                frame.block_size,
                frame.head_dim,
            )
        )
        heads = slice(None) if own_heads is None else slice(own_heads.start, own_heads.stop)
        self.frames = [index for index, _ in shape.layer_places]
        self.layers = [self.blocks[:, at, :, heads] for _, at in shape.layer_places]
        self.scales: list[torch.Tensor | None] = [None] * shape.num_layers
        self._all_scales: torch.Tensor | None = None
        if shape.is_quantized:
            stored = self._bytes[:, frame.scales].view(torch.float32)
            self._all_scales = stored.view(num_frames, frame.num_layers, 2, frame.num_kv_heads)
            self.scales = [self._all_scales[:, at, :, heads] for _, at in shape.layer_places]
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

    def is_bare(self, block_id: int) -> bool:
        """Return whether a block lacks the part of the layers with a window."""
        return self.frame_tables is not None and self.frame_tables[block_id, -1] == NO_FRAME

    def _frames(self, block_ids: Sequence[int]) -> list[int]:
        """Return the frames of some blocks, one block after the other."""
        number = self.shape.num_frames
        if self.frame_tables is not None:
            return [each for each in self.frame_tables[block_ids].reshape(-1).tolist() if each != NO_FRAME]
        return [block_id * number + frame for block_id in block_ids for frame in range(number)]

    def copies_to(self, other: KvMemory, pairs: Pairs) -> Pairs:
        """Return the copies of frames that copy blocks, given as (block, block of other memory)."""
        if self.shape.num_frames == 1:
            return pairs
        return [
            rows
            for block_id, other_id in pairs
            for rows in zip(self._frames([block_id]), other._frames([other_id]), strict=False)
        ]

    def read(self, block_id: int) -> bytes:
        """Return a copy of a block's bytes.

        This is safe during a step if the block is sealed or no sequence computes it.
        """
        with self._beside_the_step():
            rows = self._frames([block_id]) if self.shape.window else block_id
            return self._bytes[rows].cpu().numpy().tobytes()

    def write(self, block_id: int, payload: Buffer) -> Buffer:
        """Overwrite a block's bytes. During a step this is safe if no sequence in the batch reads the block.

        The copy releases the GIL. The result is a view of the block's bytes on the CPU, and the payload on a
        GPU.

        Raises:
            ValueError: the payload is not one block long, or a scale in it is not a positive number.
        """
        frames, size = self._frames([block_id]), self._frame.block_bytes
        if len(payload) != len(frames) * size:
            raise ValueError(f"a block has {len(frames) * size} bytes, got {len(payload)}")
        if self.shape.is_quantized:
            self._check_scales(payload)
        if self._stream is None:
            for index, frame in enumerate(frames):
                copied = self._bytes[frame].numpy()
                copied[:] = np.frombuffer(payload, np.uint8, size, index * size)
            return copied.data if len(frames) == 1 else self.payload(block_id)
        with self._beside_the_step():
            source = torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(-1, size)
            for index, frame in enumerate(frames):
                self._bytes[frame].copy_(source[index])
            self._stream.synchronize()
        return payload

    def _check_scales(self, payload: Buffer) -> None:
        """Raise ValueError unless each scale of a block, a divisor, is a positive normal number."""
        frames = np.frombuffer(payload, np.uint8).reshape(-1, self._frame.block_bytes)
        scales = np.ascontiguousarray(frames[:, self._frame.scales]).view(np.float32)
        if not (np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)).all():
            raise ValueError("a stored scale of the block is not a positive number")

    def payload(self, block_id: int) -> memoryview:
        """Return the bytes of a block, on the CPU: not a copy, unless its frames do not follow each other."""
        if self.frame_tables is not None:
            return self._bytes.numpy()[self._frames([block_id])].reshape(-1).data
        first, number = block_id * self.shape.num_frames, self.shape.num_frames
        return self._bytes[first : first + number].numpy().reshape(-1).data

    def frame_ids(self, block_id: int, *, is_bare: bool = False) -> Sequence[int]:
        """Return the frames of a block, or of its lasting part; none if a block is always one piece."""
        if self.frame_tables is None:
            return ()
        return self._frames([block_id])[: self.shape.lasting_frames if is_bare else None]

    def payload_or_copy(self, block_id: int, *, is_bare: bool = False) -> Buffer:
        """Return a block's bytes: a view on the CPU, a copy on a GPU. ``read`` says when this is safe.

        With ``is_bare``, return only the part that layers without a window have.
        """
        payload = self.payload(block_id) if self._stream is None else self.read(block_id)
        return payload[: self.shape.bare_bytes] if is_bare else payload

    def copies_event(self) -> torch.cuda.Event | None:
        """Return an event that occurs when all queued copies to and from the host are complete.

        On the CPU it is None, since each copy is complete when its call returns.
        """
        return None if self._stream is None else self._stream.record_event()

    def copy_within(self, pairs: Pairs) -> None:
        """Copy frames, given as (from, to), all at the same time; see ``BlockPool.copies``."""
        if pairs:
            ops.copy_blocks(self._bytes, torch.tensor(pairs, device=self.device))
            self._hold_others()

    def copy_out(self, host: KvMemory, pairs: Pairs) -> None:
        """Copy frames, given as (frame, host frame), to host memory before later steps change them."""
        if not pairs:
            return
        block_ids, host_ids = torch.tensor(pairs).unbind(1)
        staging = self._bytes.new_empty((len(block_ids), self._frame.block_bytes))
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
        """Copy frames, given as (host frame, frame), from host memory before later steps read them."""
        if not pairs:
            return
        host_ids, block_ids = torch.tensor(pairs).unbind(1)
        staging = self._bytes.new_empty((len(block_ids), self._frame.block_bytes))
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
