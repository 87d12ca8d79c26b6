"""Flow control of a push: how many blocks may be in flight, and which block is due."""

from __future__ import annotations

from quire.kvtransfer.errors import ProtocolError


class CreditWindow:
    """Keeps the receiver's credit account for one push of the blocks ``[first_block, num_blocks)``.

    Invariant: at most ``size`` blocks are granted and not yet taken. A sender that has used up its credit
    always gets more, so a push never stalls for lack of credit. Blocks 2 to 19 with a size of 8::

        grant() == 8            the sender may send blocks 2 to 9
        take(2), take(3), take(4)         grant() == 0: 5 blocks are open, more than half
        take(5)                           grant() == 4: up to block 13
    """

    def __init__(self, first_block: int, num_blocks: int, size: int) -> None:
        self._first_block = first_block
        self._num_blocks = num_blocks
        self._size = max(1, size)
        self._due = first_block
        self._granted = first_block

    @property
    def num_missing(self) -> int:
        """Number of blocks that have not been taken."""
        return self._num_blocks - self._due

    def grant(self) -> int:
        """Return how many more blocks to grant: 0 until half of the window is used, to keep grants few."""
        num_open = self._granted - self._due
        if num_open > self._size // 2:
            return 0
        credit = min(self._size - num_open, self._num_blocks - self._granted)
        self._granted += credit
        return credit

    def take(self, index: int) -> bool:
        """Record the arrival of the next block; return False if the block arrived before.

        Raises:
            ProtocolError: the block is not part of the push, leaves a gap, or exceeds the credit.
        """
        if self._first_block <= index < self._due:
            return False
        if index != self._due or index >= self._granted:
            raise ProtocolError(
                f"block {index} arrived, not block {self._due}, with credit up to block {self._granted}"
            )
        self._due += 1
        return True
