"""Pins and reads the blocks that other workers copy from this one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import TransferError
from quire.kvtransfer.frame import Frame
from quire.services.worker.blocks.block_reader import BlockReader


class PoolSource:
    """The engine's blocks as a ``BlockSource``."""

    def __init__(self, engine: EngineThread, reader: BlockReader, layout: KvLayout, epoch: str) -> None:
        self.layout = layout
        self.epoch = epoch
        self._engine = engine
        self._reader = reader

    async def pin(self, lease_id: str, block_hashes: Sequence[bytes]) -> Sequence[int]:
        """Pin the leading blocks that are present; see ``BlockSource``."""
        try:
            return await self._engine.call_when_read(
                lambda engine: block_hashes, lambda engine: engine.pin(lease_id, block_hashes)
            )
        except EngineStoppedError as error:
            raise TransferError(str(error)) from error

    def unpin(self, lease_id: str) -> None:
        """Release them."""
        with suppress(EngineStoppedError):
            self._engine.post(lambda e: e.pins.unpin(lease_id))

    def frame(self, index: int, block_hash: bytes, block_id: int, *, is_bare: bool = False) -> Frame:
        """Return the frame of a pinned block, or of its lasting part."""
        return self._reader.frame(index, block_hash, block_id, is_bare=is_bare)
