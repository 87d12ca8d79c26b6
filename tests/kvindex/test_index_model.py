"""Random lives of workers, and after each event the index says exactly what a model of sets says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kvindex.index import LeaseLostError

Hash = bytes
WORKERS = ("a", "b", "c")
TRUNK = [bytes([i]) * 16 for i in range(4)]
CHAINS = [TRUNK + [bytes([16 * branch + i]) * 16 for i in range(6)] for branch in (1, 2, 3)]
"""Three prompts with a common beginning."""


class Event(NamedTuple):
    """What happens to whom; ``chain`` and ``depth`` name blocks."""

    kind: str
    worker: str
    chain: int
    depth: int


KINDS = (
    *("join", "publish", "publish", "publish", "evict", "evict", "beat", "leave", "expire", "flush"),
    *("sweep", "zombie_publish", "zombie_evict", "zombie_leave"),
)
events = st.builds(
    Event,
    st.sampled_from(KINDS),
    st.sampled_from(WORKERS),
    st.integers(0, len(CHAINS) - 1),
    st.integers(1, len(CHAINS[0])),
)


class World:
    """An index under test, and what it ought to say."""

    def __init__(self, backend: Any, record: Callable[[str], Any]) -> None:
        self.backend = backend
        self.index = backend.index
        self.record = record
        self.leases: dict[str, Any] = {}
        self.zombies: dict[str, Any] = {}
        self.published: dict[str, set[Hash]] = {}
        """Blocks of each live worker."""

    async def apply(self, event: Event) -> None:
        await getattr(self, event.kind)(event)

    async def join(self, event: Event) -> None:
        if event.worker in self.leases:
            self.zombies[event.worker] = self.leases[event.worker]
        self.leases[event.worker] = self.backend.lease()
        await self.leases[event.worker].join(self.record(event.worker))
        self.published[event.worker] = set()

    async def publish(self, event: Event) -> None:
        blocks = CHAINS[event.chain][: event.depth]
        if await self._is_alive(event, lambda lease: lease.publish(blocks)):
            self.published[event.worker] |= set(blocks)

    async def evict(self, event: Event) -> None:
        """Evict a block with all that follows it, children first."""
        block = CHAINS[event.chain][event.depth - 1]
        subtree = {each for chain in CHAINS if block in chain for each in chain[chain.index(block) :]}
        children_first = sorted(subtree, key=lambda each: -max(c.index(each) for c in CHAINS if each in c))
        if event.worker in self.leases:
            await self.leases[event.worker].evict(children_first)
            self.published.get(event.worker, set()).difference_update(subtree)

    async def beat(self, event: Event) -> None:
        await self._is_alive(event, lambda lease: lease.beat())

    async def leave(self, event: Event) -> None:
        if event.worker in self.leases:
            await self.leases[event.worker].leave()
            self.published.pop(event.worker, None)

    async def sweep(self, event: Event) -> None:
        """Change nothing that counts."""
        if event.worker in self.leases:
            await self.leases[event.worker].sweep()

    async def expire(self, event: Event) -> None:
        await self.backend.expire(event.worker)
        self.published.pop(event.worker, None)

    async def flush(self, event: Event) -> None:
        await self.backend.flush()
        self.published.clear()

    async def zombie_publish(self, event: Event) -> None:
        blocks = CHAINS[event.chain][: event.depth]
        if event.worker in self.zombies and blocks:
            try:
                await self.zombies[event.worker].publish(blocks)
            except LeaseLostError:
                return
            raise AssertionError("a zombie published")

    async def zombie_evict(self, event: Event) -> None:
        if event.worker in self.zombies:
            await self.zombies[event.worker].evict(CHAINS[event.chain][::-1])

    async def zombie_leave(self, event: Event) -> None:
        if event.worker in self.zombies:
            await self.zombies[event.worker].leave()

    async def _is_alive(self, event: Event, call: Callable[[Any], Any]) -> bool:
        """Make a call that wants a lease, and check that it succeeds exactly if there is one."""
        if event.worker not in self.leases:
            return False
        try:
            await call(self.leases[event.worker])
        except LeaseLostError:
            assert event.worker not in self.published
            return False
        assert event.worker in self.published
        return True

    async def check(self) -> None:
        for chain in CHAINS:
            expected = {
                worker: next((i for i, each in enumerate(chain) if each not in blocks), len(chain))
                for worker, blocks in self.published.items()
            }
            found = {h.worker.worker_id: h.num_blocks for h in await self.index.look_up(chain)}
            assert found == {worker: depth for worker, depth in expected.items() if depth}
        members = {member.worker_id for member in await self.backend.index.members()}
        assert members == set(self.published)


# The fixtures hold no state of an example: each example makes a backend of its own.
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(history=st.lists(events, max_size=40))
def test_the_index_equals_a_model(history: list[Event], make_backend: Any, record: Any) -> None:
    async def live() -> None:
        backend = make_backend()
        await backend.flush()
        world = World(backend, record)
        try:
            for event in history:
                await world.apply(event)
                await world.check()
        finally:
            await backend.close()

    asyncio.run(live())
