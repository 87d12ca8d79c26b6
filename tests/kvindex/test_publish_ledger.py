"""The ledger of unpublished changes: whatever happens, the index comes to say what the pool holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.kvindex.publish_ledger import PublishLedger

MAX_EVICTIONS = 6
CHILDREN = 2
NUM_BLOCKS = 30
BLOCKS = [bytes([index]) for index in range(NUM_BLOCKS)]
"""A tree in an array: the parent of block i is (i - 1) // 2."""

indices = st.integers(0, NUM_BLOCKS - 1)


def parent(index: int) -> int:
    return (index - 1) // CHILDREN


class Following(RuleBasedStateMachine):
    """A pool that changes, and an index that follows in batches; some batches are lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = PublishLedger(MAX_EVICTIONS, clock=lambda: self.now)
        self.pool: set[int] = set()
        self.index: set[int] = set()

    @rule(index=indices, starts_at_parent=st.booleans())
    def store(self, index: int, starts_at_parent: bool) -> None:
        """Store a block and the parents that it lacks; hearing of one twice changes nothing."""
        path = [index]
        while path[-1]:
            path.append(parent(path[-1]))
        first = next((i for i, each in enumerate(path) if each in self.pool), len(path))
        known = BLOCKS[path[first]] if first < len(path) and starts_at_parent else None
        new = path[:first] if known is not None else path
        self.pool |= set(path)
        self.ledger.stored([BLOCKS[each] for each in reversed(new)], known)

    @rule(index=indices)
    def remove(self, index: int) -> None:
        """Remove a block and what follows it."""
        subtree = {index}
        for each in range(index + 1, NUM_BLOCKS):
            if parent(each) in subtree:
                subtree.add(each)
        self.pool -= subtree
        self.ledger.removed([BLOCKS[each] for each in sorted(subtree, reverse=True)])

    @rule()
    def restart(self) -> None:
        self.index.clear()
        self.ledger.restart()

    @rule()
    def stop(self) -> None:
        self.ledger.stop()

    @rule(limit=st.integers(1, 4))
    def evict(self, limit: int) -> None:
        for block in self.ledger.take_evictions(limit):
            self.index.remove(block[0])
            self.index_is_closed()

    @rule(limit=st.integers(1, 4), is_refused=st.booleans(), between=indices)
    def publish(self, limit: int, is_refused: bool, between: int) -> None:
        batch = self.ledger.take_publications(limit)
        if is_refused and self.ledger.is_following:
            # The pool goes on while the publish is under way.
            self.remove(between)
            if self.ledger.is_following:
                self.ledger.put_back(batch)
            return
        for block in batch:
            self.index.add(block[0])
            self.index_is_closed()

    @rule()
    def catch_up(self) -> None:
        if not self.ledger.is_following:
            self.restart()
        while self.ledger.num_pending:
            self.now += 1.0
            self.evict(3)
            self.publish(3, False, 0)
        assert self.index == self.pool
        assert self.ledger.lag_seconds == 0.0

    @invariant()
    def index_is_closed(self) -> None:
        for index in self.index:
            assert index == 0 or parent(index) in self.index

    @invariant()
    def the_ledger_is_bounded(self) -> None:
        assert self.ledger.num_held == len(self.pool)
        assert self.ledger.num_pending <= len(self.pool) + MAX_EVICTIONS


TestFollowing = Following.TestCase


def test_blocks_whose_parent_is_not_held_are_not_published() -> None:
    ledger = PublishLedger()
    ledger.restart()
    assert not ledger.stored(BLOCKS[1:3], BLOCKS[0])
    assert (ledger.num_held, ledger.num_pending) == (0, 0)


def test_only_what_changes_a_settled_ledger_wakes() -> None:
    now = 5.0
    ledger = PublishLedger(clock=lambda: now)
    assert not ledger.stored(BLOCKS[:1])
    ledger.restart()
    assert ledger.take_publications(9) == BLOCKS[:1]
    assert not ledger.stored(BLOCKS[:1])
    assert ledger.stored(BLOCKS[1:2])
    now = 7.0
    assert not ledger.stored(BLOCKS[2:3])
    assert ledger.lag_seconds == 2.0
    assert not ledger.removed(BLOCKS[1:3])
    assert ledger.num_pending == 0
    assert ledger.removed(BLOCKS[:1])


@given(st.integers(0, 5))
def test_too_many_evictions_end_the_following(num_more: int) -> None:
    ledger = PublishLedger(max_evictions=4)
    ledger.restart()
    ledger.stored(BLOCKS)
    ledger.take_publications(NUM_BLOCKS)
    assert ledger.removed(BLOCKS[: -6 - num_more : -1])
    assert not ledger.is_following
    assert ledger.num_pending == 0
    assert ledger.leftovers() == BLOCKS[: ledger.num_held][::-1]
