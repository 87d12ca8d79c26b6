"""The ledger of host blocks, where preempted groups wait."""

from __future__ import annotations

from collections.abc import Sequence


class SwapSpace:
    """Host blocks, each of one owner.

    A block that is copied back is free only after the step that copies it: within the step another group's
    block could be copied over it first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._freed_after_step: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks; the caller has looked at ``num_free``."""
        taken = self._free[:num_blocks]
        del self._free[:num_blocks]
        return taken

    def free(self, host_ids: Sequence[int]) -> None:
        """Give blocks back."""
        self._free += host_ids

    def free_after_step(self, host_ids: Sequence[int]) -> None:
        """Give blocks back when the present step has copied them."""
        self._freed_after_step += host_ids

    def step_done(self) -> None:
        """Note that the step's copies have been made."""
        self._free += self._freed_after_step
        self._freed_after_step.clear()
