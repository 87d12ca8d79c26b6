"""Pushes a prompt's blocks to a decode worker as they become full, then commits the first token."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from quire.engine.sequences.sequence import NO_BLOCK, Sequence, SequenceUpdate
from quire.kvtransfer.errors import ProtocolError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.push_sender import BlockPush, PushSummary
from quire.services.worker.blocks.block_reader import BlockReader
from quire.services.worker.requests.updates import Updates


class PushedPrompt(NamedTuple):
    """What was pushed, and the times after the prompt's computation.

    Attributes:
        computed_at: when the engine had computed the prompt.
        credit_wait_seconds: seconds for which blocks waited for credit after that.
        committed_at: when the decode worker had admitted the sequence.
    """

    summary: PushSummary
    computed_at: float
    credit_wait_seconds: float
    committed_at: float


class PrefillPush:
    """Pushes one prompt's blocks while the engine computes them.

    It runs in a separate task, since it may still wait for the decode worker's credit when the prompt is
    computed and the client has its first token.

    Args:
        sequence: the prompt.
        reader: reads its blocks.
        push: sends them.
        num_bare: how many leading blocks the decode worker gets without the part of the layers with a window.
    """

    def __init__(self, sequence: Sequence, reader: BlockReader, push: BlockPush, num_bare: int = 0) -> None:
        self._sequence = sequence
        self._reader = reader
        self._push = push
        self._num_bare = num_bare
        self._progress = Updates()
        self._computed_at = 0.0
        self._waited_seconds = 0.0

    def record_progress(self, update: SequenceUpdate) -> None:
        """Record how many tokens the engine has computed."""
        if update.status.is_finished:
            self._computed_at = perf_counter()
            self._waited_seconds = self._push.credit_wait_seconds
        self._progress.put(update)

    async def run(self) -> PushedPrompt:
        """Push each block that the decode worker lacks as soon as it is full, and commit.

        Raises:
            PushFailedError: the decode worker refused or vanished.
        """
        block_size = self._reader.block_size
        next_block = None
        async with self._push as push:
            while True:
                update = await self._progress.next()
                if next_block is None:
                    next_block = await push.opened()
                num_ready = update.num_computed_tokens // block_size
                if update.status.is_finished:
                    # Push the last block too, even if it is not full: this worker adds nothing to it.
                    num_ready = -(-update.num_computed_tokens // block_size)
                await push.send(map(self._frame, range(next_block, num_ready)))
                next_block = max(next_block, num_ready)
                if update.status.is_finished:
                    summary = await push.commit(update.tokens[0].token_id if update.tokens else None)
                    waited_seconds = summary.credit_wait_seconds - self._waited_seconds
                    return PushedPrompt(summary, self._computed_at, waited_seconds, perf_counter())

    def _frame(self, index: int) -> Frame:
        is_full = (index + 1) * self._reader.block_size <= self._sequence.num_computed_tokens
        block_hash = self._sequence.block_hashes[index] if is_full else b""
        block_id = self._sequence.block_table[index]
        if block_id == NO_BLOCK:
            raise ProtocolError(f"block {index} was requested but is free again: no token sees it")
        return self._reader.frame(index, block_hash, block_id, is_bare=index < self._num_bare)
