"""The ledger of host blocks. They contain the blocks of preempted groups and of the host cache."""

from __future__ import annotations

from collections.abc import Sequence


class SwapSpace:
    """Allocates host blocks, each to one owner.

    A host block that is copied back to the pool becomes free only after the step that copies it. Otherwise
    the same step could overwrite it with another group's block before that copy.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._freed_after_step: list[int] = []

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks and return their ids; the caller has checked ``num_free``."""
        taken = self._free[:num_blocks]
        del self._free[:num_blocks]
        return taken

    def free(self, host_ids: Sequence[int]) -> None:
        """Free blocks; they can be allocated immediately."""
        self._free += host_ids

    def free_after_step(self, host_ids: Sequence[int]) -> None:
        """Free blocks once the current step has copied them."""
        self._freed_after_step += host_ids

    def keep_after_step(self, host_ids: Sequence[int]) -> None:
        """Give the caller back the blocks that the current step does not copy after all."""
        for each in host_ids:
            self._freed_after_step.remove(each)

    def end_step(self) -> None:
        """Free the blocks that the step has copied."""
        self._free += self._freed_after_step
        self._freed_after_step.clear()
