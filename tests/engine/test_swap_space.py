"""The ledger of host blocks: one owner for each, and no reuse before a copy has been made."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.engine.kv_cache.swap_space import SwapSpace

NUM_BLOCKS = 6


class SwapSpaceMachine(RuleBasedStateMachine):
    """Owners take blocks and give them back, at once or after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SwapSpace(NUM_BLOCKS)
        self.owned: set[int] = set()
        self.being_copied: set[int] = set()

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.space.num_free)
        taken = self.space.allocate(num_blocks)
        assert len(set(taken)) == num_blocks
        assert set(taken) <= set(range(NUM_BLOCKS))
        assert not self.owned.intersection(taken), "a block has two owners"
        assert not self.being_copied.intersection(taken), "a block is overwritten before it is copied"
        self.owned.update(taken)

    @rule(data=st.data(), is_copied=st.booleans())
    def free(self, data: st.DataObject, is_copied: bool) -> None:
        given = data.draw(st.sets(st.sampled_from(sorted(self.owned)))) if self.owned else set()
        self.owned -= given
        if is_copied:
            self.space.free_after_step(sorted(given))
            self.being_copied |= given
        else:
            self.space.free(sorted(given))

    @rule()
    def end_step(self) -> None:
        self.space.end_step()
        self.being_copied.clear()

    @invariant()
    def every_block_is_counted_once(self) -> None:
        assert self.space.num_free + len(self.owned) + len(self.being_copied) == NUM_BLOCKS


TestSwapSpace = SwapSpaceMachine.TestCase
TestSwapSpace.settings = settings(max_examples=30, stateful_step_count=30)
