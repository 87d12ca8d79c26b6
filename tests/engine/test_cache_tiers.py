"""Pool, host memory and disk against an exact model: who holds what, in which order, with which bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.engine.kv_cache.block_pool import BlockPool, NoFreeBlocksError
from quire.engine.kv_cache.disk_cache import READ_SECONDS, DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.tiers import MAX_LOADING_SHARE, CacheTiers
from quire.kvindex.kv_layout import KvShape
from tests.testing.manual_clock import ManualClock
from tests.testing.manual_disk import ManualExecutor, open_disk

NUM_POOL, NUM_HOST, NUM_DISK = 6, 5, 7
SHAPE = KvShape(1, 1, 4, 4, "float32")
CPU = torch.device("cpu")
Hash = bytes


class RecordingHostCache(HostCache):
    """Records which host block holds each block."""

    def __init__(self, memory: KvMemory) -> None:
        super().__init__(memory)
        self.host_ids: dict[Hash, int] = {}

    def add_block(self, block_hash: Hash, host_id: int) -> None:
        super().add_block(block_hash, host_id)
        self.host_ids[block_hash] = host_id


def name(word: str) -> Hash:
    """Return the hash of the block that ends the word: the word itself."""
    return word.encode().rjust(16, b"_")


def chain(word: str) -> list[Hash]:
    return [name(word[: length + 1]) for length in range(len(word))]


def parent(block_hash: Hash) -> Hash | None:
    word = block_hash.decode().lstrip("_")
    return name(word[:-1]) if len(word) > 1 else None


def content(block_hash: Hash) -> bytes:
    return block_hash * (SHAPE.block_bytes // 16)


class Published:
    """What a listener has heard; checks that it stays closed under prefixes."""

    def __init__(self) -> None:
        self.hashes: set[Hash] = set()

    def stored(self, block_hashes: Sequence[Hash], parent_hash: Hash | None) -> None:
        for each in block_hashes:
            assert parent(each) == parent_hash
            assert parent_hash is None or parent_hash in self.hashes, "a child came before its parent"
            self.hashes.add(each)
            parent_hash = each

    def removed(self, block_hashes: Sequence[Hash]) -> None:
        for each in block_hashes:
            self.hashes.remove(each)
            assert not any(parent(other) == each for other in self.hashes), "a parent went before its child"


class Model:
    """The tiers as lists of hashes, the next to go first."""

    def __init__(self) -> None:
        self.pool: list[Hash] = []
        """Blocks that no request uses."""
        self.used: dict[Hash, int] = {}
        self.num_empty = NUM_POOL
        self.host: list[Hash] = []
        self.disk: list[Hash] = []
        self.num_moving = 0
        """Host blocks that hold nothing yet, or still."""

    @property
    def held(self) -> set[Hash]:
        return {*self.pool, *self.used, *self.host, *self.disk}

    def load(self, hashes: list[Hash]) -> None:
        """Read from disk the blocks that no other tier holds."""
        known = [each for each in hashes if each in self.held]
        known = known[: next((i for i, each in enumerate(hashes) if each not in self.held), len(hashes))]
        self._touch(self.host, known)
        self._touch(self.disk, known)
        loading: list[Hash] = []
        for each in known:
            if each in self.pool or each in self.used or each in self.host:
                continue
            if len(loading) >= MAX_LOADING_SHARE * NUM_HOST:
                break
            self._make_room_on_host()
            if each not in self.disk:
                break
            loading.append(each)
            self.num_moving += 1
        self.num_moving = 0
        self.host += [each for each in loading if each in self.held]
        self._touch(self.host, known)

    def promote(self, hashes: list[Hash]) -> None:
        """Bring what host memory has of a chain into the pool."""
        num_held = self._in_pool(hashes)
        self._use(hashes[:num_held])
        wanted = hashes[num_held:]
        wanted = wanted[: next((i for i, each in enumerate(wanted) if each not in self.host), len(wanted))]
        wanted = wanted[: self.num_allocatable]
        self.host = [each for each in self.host if each not in wanted]
        self.num_moving = len(wanted)
        self._allocate(len(wanted), coming=set(wanted))
        self.num_moving = 0
        self.used |= dict.fromkeys(wanted, 1)
        self.free(hashes[: num_held + len(wanted)])

    @property
    def num_allocatable(self) -> int:
        return self.num_empty + len(self.pool)

    def start(self, hashes: list[Hash]) -> bool:
        """Use a chain, computing what the pool lacks; return whether it fits."""
        num_held = self._in_pool(hashes)
        self._use(hashes[:num_held])
        if len(hashes) - num_held > self.num_allocatable:
            self.free(hashes[:num_held])
            return False
        self._allocate(len(hashes) - num_held, coming=set())
        self.used |= dict.fromkeys(hashes[num_held:], 1)
        self.host = [each for each in self.host if each not in self.used]
        return True

    def free(self, hashes: list[Hash]) -> None:
        for each in reversed(hashes):
            self.used[each] -= 1
            if not self.used[each]:
                del self.used[each]
                self.pool.append(each)

    def drop(self, block_hash: Hash) -> None:
        """Forget a block that no tier has, and what follows it."""
        for tier in (self.host, self.disk):
            tier[:] = [each for each in tier if not self._follows(each, block_hash)]

    def _in_pool(self, hashes: list[Hash]) -> int:
        inside = {*self.pool, *self.used}
        return next((i for i, each in enumerate(hashes) if each not in inside), len(hashes))

    def _use(self, hashes: list[Hash]) -> None:
        for each in hashes:
            if each in self.pool:
                self.pool.remove(each)
            self.used[each] = self.used.get(each, 0) + 1

    def _allocate(self, num: int, coming: set[Hash]) -> None:
        num_evicted = max(0, num - self.num_empty)
        self.num_empty -= num - num_evicted
        evicted, self.pool = self.pool[:num_evicted], self.pool[num_evicted:]
        for index, each in enumerate(evicted):
            above = {*self.pool, *self.used, *coming, *evicted[index:]}
            if self._make_room_on_host(above):
                self.host.append(each)
            elif each not in self.disk:
                self.drop(each)

    def _make_room_on_host(self, above: set[Hash] | None = None) -> bool:
        above = {*self.pool, *self.used} if above is None else above
        while len(self.host) + self.num_moving >= NUM_HOST:
            if not self.host:
                return False
            self._to_disk(self.host.pop(0), above)
        return True

    def _to_disk(self, block_hash: Hash, above: set[Hash]) -> None:
        if block_hash in self.disk:
            self._touch(self.disk, [block_hash])
            return
        if len(self.disk) >= NUM_DISK:
            oldest = self.disk.pop(0)
            if oldest not in above and oldest not in self.host:
                self.drop(oldest)
                assert not self._follows(block_hash, oldest), "leaves go first"
        self.disk.append(block_hash)

    @staticmethod
    def _touch(tier: list[Hash], hashes: list[Hash]) -> None:
        for each in reversed(hashes):
            if each in tier:
                tier.remove(each)
                tier.append(each)

    @staticmethod
    def _follows(block_hash: Hash, ancestor: Hash) -> bool:
        return block_hash.lstrip(b"_").startswith(ancestor.lstrip(b"_"))


words = st.text("ab", min_size=1, max_size=5)


class TiersMachine(RuleBasedStateMachine):
    """Chains are words over {a, b}; their blocks are computed, freed, pushed down and brought back."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.memory = KvMemory(SHAPE, NUM_POOL, CPU)
        self.begin("same")
        self.model = Model()

    def begin(self, identity: str) -> None:
        self.later = ManualExecutor()
        self.clock = ManualClock()
        self.published = Published()
        disk = open_disk(
            Path(self.folder.name),
            self.later,
            block_bytes=SHAPE.block_bytes,
            num_blocks=NUM_DISK,
            identity=identity,
            clock=self.clock,
        )
        self.host = RecordingHostCache(KvMemory(SHAPE, NUM_HOST, CPU))
        self.tiers = CacheTiers(self.memory, self.host, disk, self.published)
        self.pool = BlockPool(NUM_POOL, self.published, self.tiers)
        self.tables: list[tuple[list[Hash], list[int]]] = []

    @property
    def disk(self) -> DiskCache:
        assert self.tiers.disk is not None
        return self.tiers.disk

    @rule(word=words)
    def load(self, word: str) -> None:
        prefetch = self.tiers.prefetch(chain(word))
        self.later.run()
        self.tiers.apply_disk_results()
        assert prefetch.is_done
        self.model.load(chain(word))

    @rule(word=words)
    def promote(self, word: str) -> None:
        self.tiers.promote_into(self.pool, chain(word))
        self.model.promote(chain(word))

    @rule(word=words)
    def start(self, word: str) -> None:
        """Use a chain, computing what is not in the pool even if a lower tier has it."""
        hashes = chain(word)
        table = self.pool.look_up(hashes)
        num_held = len(table)
        self.pool.share(table)
        try:
            table += self.pool.allocate(len(hashes) - num_held)
        except NoFreeBlocksError:
            self.pool.free(table)
            assert not self.model.start(hashes)
            return
        assert self.model.start(hashes)
        for index in range(num_held, len(hashes)):
            self.memory.write(table[index], content(hashes[index]))
            table[index] = self.pool.seal(table[index], hashes[index], parent(hashes[index]))
        self.tables.append((hashes, table))

    @rule(seed=st.integers(0, 1000), steps=st.lists(st.sampled_from(["load", "promote"]), max_size=2))
    def serve(self, seed: int, steps: list[str]) -> None:
        """Serve requests one after the other, with and without the ways back."""
        random = Random(seed)
        for _ in range(6):
            word = "".join(random.choices("ab", k=random.randint(2, 5)))
            for step in steps:
                getattr(self, step)(word)
                self.tiers_equal_the_model()
            self.start(word)
            self.tiers_equal_the_model()
            if self.tables and self.tables[-1][0] == chain(word):
                hashes, table = self.tables.pop()
                self.pool.free(table)
                self.model.free(hashes)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        hashes, table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.model.free(hashes)

    @precondition(lambda self: len(self.disk) > 0)
    @rule(data=st.data(), damage=st.sampled_from(["flip", "truncate", "remove"]))
    def damage(self, data: st.DataObject, damage: str) -> None:
        """Damage a file and read it: it is a miss, counted, and gone with what follows it."""
        self.later.run()
        self.tiers.apply_disk_results()
        block_hash = data.draw(st.sampled_from(list(self.disk)))
        path = Path(self.folder.name) / f"{block_hash.hex()}.kv"
        payload = path.read_bytes()
        if damage == "flip":
            place = data.draw(st.integers(0, len(payload) - 1))
            path.write_bytes(payload[:place] + bytes([payload[place] ^ 1]) + payload[place + 1 :])
        elif damage == "truncate":
            path.write_bytes(payload[: data.draw(st.integers(0, len(payload) - 1))])
        else:
            path.unlink()
        hashes = chain(block_hash.decode().lstrip("_"))
        num_errors = sum(self.tiers.counts.disk_errors.values())
        self.tiers.prefetch(hashes)
        self.later.run()
        self.tiers.apply_disk_results()
        num_new = sum(self.tiers.counts.disk_errors.values()) - num_errors
        if num_new:
            # What the model does not foresee is when a damaged file was read; what is left must be right.
            assert num_new == 1
            assert block_hash not in self.disk
        elif block_hash in self.disk:
            path.write_bytes(payload)  # it was not read
        self.follow()

    @rule(word=words, other=words)
    def stall(self, word: str, other: str) -> None:
        """Read while the disk does not answer: nothing waits for long, and the blocks arrive later."""
        first = self.tiers.prefetch(chain(word))
        num_reads = first.num_left
        self.clock.now += READ_SECONDS
        self.tiers.apply_disk_results()
        assert first.is_done
        second = self.tiers.prefetch(chain(other))
        assert second.is_done or not num_reads
        self.later.run()
        self.tiers.apply_disk_results()
        assert second.is_done
        assert not self.disk.is_stalled
        self.follow()

    def follow(self) -> None:
        """Let the model go on from what the tiers hold; the invariants check all of it."""
        self.model.host, self.model.disk = list(self.tiers.host), list(self.disk)

    @rule(is_killed=st.booleans(), is_same=st.booleans())
    def restart(self, is_killed: bool, is_same: bool) -> None:
        """End the worker and start it again: what was written is there, if it is still right.

        A kill loses what is queued: blocks that were to be written are gone, those that were to go are back.
        """
        if is_killed:
            self.later.calls.clear()
        before = set(self.disk)
        self.disk.close()
        self.begin("same" if is_same else "another")
        self.model = Model()
        self.model.disk = list(self.disk)
        found = set(self.disk)
        if not is_same:
            assert not found
            self.disk.close()
            self.begin("same")
        elif not is_killed:
            reachable = {each for each in before if all(p in before for p in ancestors(each))}
            assert found == reachable

    @invariant()
    def tiers_equal_the_model(self) -> None:
        self.pool.check_conservation()
        self.tiers.check_conservation(self.pool)
        assert list(self.tiers.host) == self.model.host
        assert list(self.disk) == self.model.disk
        for each in self.model.held:
            is_in_pool = each in self.model.used or each in self.model.pool
            assert bool(self.pool.look_up([each])) == is_in_pool
        assert self.published.hashes == self.model.held

    @invariant()
    def bytes_are_right(self) -> None:
        for each in self.model.held:
            for block_id in self.pool.look_up([each]):
                assert self.memory.read(block_id) == content(each)
        for each in self.model.host:
            assert bytes(self.host.payload(self.host.host_ids[each])) == content(each)

    def teardown(self) -> None:
        self.disk.close()
        self.folder.cleanup()


def ancestors(block_hash: Hash) -> list[Hash]:
    return chain(block_hash.decode().lstrip("_"))[:-1]


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_promoted_block_is_not_overwritten_before_the_step_has_copied_it() -> None:
    host = HostCache(KvMemory(SHAPE, 1, CPU))
    [host_id] = host.allocate(1)
    host.add_block(name("a"), host_id)
    assert host.pop_for_promotion(name("a")) == host_id
    assert (len(host), host.num_free) == (0, 0)
    host.end_step()
    assert host.num_free == 1


def test_blocks_that_no_step_promotes_after_all_are_in_host_memory_again() -> None:
    memory = KvMemory(SHAPE, NUM_POOL, CPU)
    tiers = CacheTiers(memory, HostCache(KvMemory(SHAPE, NUM_HOST, CPU)))
    pool = BlockPool(NUM_POOL, lower=tiers)
    blocks = pool.allocate(3)
    for block_id, each in zip(blocks, chain("abc"), strict=True):
        pool.seal(block_id, each, parent(each))
    pool.free(blocks)
    pool.free(pool.allocate(NUM_POOL))
    first, *others = tiers.begin_promotion(chain("abc"))
    tiers.undo_promotion(pool, others)
    tiers.promote([(first, 0)])
    assert list(tiers.host) == [name("abc"), name("ab")]
    assert tiers.host.num_free == NUM_HOST - 2
    assert tiers.counts.promotions["host"] == 1


def test_a_block_that_was_dropped_before_its_promotion_was_undone_frees_its_host_block() -> None:
    tiers = CacheTiers(KvMemory(SHAPE, NUM_POOL, CPU), HostCache(KvMemory(SHAPE, NUM_HOST, CPU)))
    pool = BlockPool(NUM_POOL, lower=tiers)
    [block_id] = pool.allocate(1)
    pool.seal(block_id, name("a"))
    pool.free([block_id])
    pool.free(pool.allocate(NUM_POOL))
    host_ids = tiers.begin_promotion(chain("a"))
    tiers.on_blocks_forgotten(chain("a"))
    tiers.undo_promotion(pool, host_ids)
    assert tiers.host.num_free == NUM_HOST
    tiers.check_conservation(pool)
