"""Preemption, a push and an abort at the same time, in every order, on the worker at each end of the push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, permutations

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel
from tests.testing.tiny_engine import make_engine, make_prompt, make_request, output, updates_of

pytestmark = pytest.mark.slow

LENGTHS = {"old": 28, "new": 40, "pushed": 40}
"""Prompt tokens of the requests in their order of arrival; a block has 16."""
MAX_STEPS = 200
PUSH_OF = {
    "receiver": ("accept", "reserve", "write", "admit"),
    "sender": ("add", "read_first", "read_rest", "release"),
}


def request(name: str) -> Sequence:
    return make_request(name, make_prompt(LENGTHS[name], len(name)), max_tokens=22, seed=3)


def orders(push: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield all orders of preemption and abort before, between and after the parts of a push."""
    for places in combinations(range(len(push) + 2), 2):
        for others in permutations(("preempt", "abort")):
            parts, rest = iter(push), dict(zip(places, others, strict=True))
            yield tuple(rest.get(place) or next(parts) for place in range(len(push) + 2))


@dataclass
class Reference:
    """What the requests give when nothing disturbs them.

    Attributes:
        outputs: the tokens of each request.
        digests: of each full block, by its hash.
        payloads: the blocks of the prompt that is pushed; the last one is not full.
    """

    outputs: dict[str, list[int]] = field(default_factory=dict)
    digests: dict[bytes, int] = field(default_factory=dict)
    payloads: list[bytes] = field(default_factory=list)


def digests(engine: Engine) -> dict[bytes, int]:
    """Return the digest of each full block of the requests, by its hash."""
    found = {}
    for group in engine.groups.values():
        for sequence in group.sequences:
            for index in range(sequence.num_sealed_blocks):
                payload = engine.memory.read(sequence.block_table[index])
                found[sequence.block_hashes[index]] = xxh3_64_intdigest(payload)
    return found


@pytest.fixture(scope="module")
def reference(load: Callable[[str], LoadedModel]) -> Reference:
    found = Reference()
    for name in LENGTHS:
        engine, sequence = make_engine(load("llama")), request(name)
        engine.add_request(sequence)
        while not engine.is_idle:
            engine.step()
            found.digests |= digests(engine)
        found.outputs[name] = output(sequence)
    engine, prompt = make_engine(load("llama")), request("pushed")
    prompt.stops_after_prefill = True
    list(updates_of(engine, prompt))
    found.payloads = [engine.memory.read(block_id) for block_id in prompt.block_table]
    return found


class Worker:
    """A worker with few blocks that generates two answers and takes part in a push."""

    def __init__(self, model: LoadedModel, is_swapped: bool, reference: Reference) -> None:
        self.engine = make_engine(
            model, num_blocks=13, num_swap_blocks=16, max_num_batched_tokens=6, prefers_swap=is_swapped
        )
        self.reference = reference
        self.requests = {name: request(name) for name in LENGTHS}
        self.aborted: set[str] = set()
        self.granted: list[bool] = []
        self.fixed: dict[int, int] = {}
        """The blocks that the push reads or has written, with the digests that they must keep."""
        for name in ("old", "new"):
            self.engine.add_request(self.requests[name])
        self.step_until(lambda: len(output(self.requests["new"])) >= 2)

    @property
    def pushed(self) -> Sequence:
        return self.requests["pushed"]

    @property
    def is_pushing(self) -> bool:
        """Whether the pushed request is here and was not aborted."""
        return "pushed" in self.engine.groups

    def step(self) -> None:
        self.engine.step()
        self.check()

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError("the engine makes no progress")

    def check(self) -> None:
        """Compare every block with its digest."""
        for block_hash, digest in digests(self.engine).items():
            assert self.reference.digests[block_hash] == digest
        for block_hash, digest in self.reference.digests.items():
            for block_id in self.engine.pool.look_up([block_hash]):
                assert xxh3_64_intdigest(self.engine.memory.read(block_id)) == digest
        assert self.fixed.keys() <= set(self.pushed.block_table)
        for fixed_id, digest in self.fixed.items():
            assert xxh3_64_intdigest(self.engine.memory.read(fixed_id)) == digest
        self.engine.check_conservation()

    # --- preemption and abort -----------------------------------------------------------------------------

    def preempt(self, _: str) -> None:
        """Let others write all free blocks until a request has been preempted, or none can be."""
        before = self.engine.preemption.num_preempted
        for _step in range(20):
            for block_id in self.engine.pins.reserve("others", self.engine.pool.num_allocatable):
                self.engine.memory.write(block_id, bytes([255]) * self.engine.memory.shape.block_bytes)
            if self.engine.preemption.num_preempted > before:
                break
            self.step()
        self.engine.pins.unpin("others")

    def abort(self, name: str) -> None:
        if name in self.engine.groups:
            self.aborted.add(name)
        if name == "pushed":
            self.fixed.clear()
        self.engine.abort(name)

    # --- the push, on the worker that receives it -----------------------------------------------------------

    def accept(self, _: str) -> None:
        self.engine.transfers.accept(self.pushed)

    def reserve(self, _: str) -> None:
        if self.is_pushing:
            self.engine.transfers.reserve("pushed", self.granted.append)
            self.engine.transfers.grant_blocks()

    def write(self, _: str) -> None:
        self.step_until(lambda: bool(self.granted) or not self.is_pushing)
        if not self.is_pushing:
            return
        for block_id, payload in zip(self.pushed.block_table, self.reference.payloads, strict=True):
            self.engine.memory.write(block_id, payload)
            self.fixed[block_id] = xxh3_64_intdigest(payload)

    def admit(self, _: str) -> None:
        if self.is_pushing:
            self.fixed.clear()
            self.engine.transfers.admit("pushed", self.reference.outputs["pushed"][0])

    # --- the push, on the worker that sends it --------------------------------------------------------------

    def add(self, _: str) -> None:
        self.pushed.stops_after_prefill = True
        self.engine.add_request(self.pushed)

    def read_first(self, _: str) -> None:
        self._read(1)

    def read_rest(self, _: str) -> None:
        self._read(len(self.reference.payloads))

    def _read(self, number: int) -> None:
        num_tokens = min(number * 16, LENGTHS["pushed"])
        self.step_until(lambda: self.pushed.num_computed_tokens >= num_tokens or not self.is_pushing)
        if not self.is_pushing:
            return
        for index, block_id in enumerate(self.pushed.block_table[:number]):
            payload = self.engine.memory.read(block_id)
            self.fixed[block_id] = xxh3_64_intdigest(payload)
            num_in_block = min(16, LENGTHS["pushed"] - 16 * index)
            assert self._tokens(payload, num_in_block) == self._tokens(
                self.reference.payloads[index], num_in_block
            )

    def _tokens(self, payload: bytes, number: int) -> bytes:
        """Return the first tokens of a block; old bytes follow the last token of a prompt."""
        shape = self.engine.memory.shape
        rows = np.frombuffer(payload, np.uint8).reshape(shape.num_layers * 2 * shape.num_kv_heads, 16, -1)
        return rows[:, :number].tobytes()

    def release(self, _: str) -> None:
        self.fixed.clear()
        self.engine.abort("pushed")


@pytest.mark.parametrize("aborted", LENGTHS)
@pytest.mark.parametrize("side", PUSH_OF)
@pytest.mark.parametrize(("is_swapped", "num_steps"), [(True, 0), (True, 1), (False, 1)])
def test_preemption_push_and_abort_in_every_order_leave_the_blocks_of_the_others_unchanged(
    load: Callable[[str], LoadedModel],
    reference: Reference,
    is_swapped: bool,
    aborted: str,
    side: str,
    num_steps: int,
) -> None:
    num_preempted = 0
    for order in orders(PUSH_OF[side]):
        worker = Worker(load("llama"), is_swapped, reference)
        for part in order:
            getattr(worker, part)(aborted)
            for _ in range(num_steps):
                worker.step()
        worker.step_until(lambda engine=worker.engine: engine.is_idle)  # type: ignore[misc]
        for name in LENGTHS.keys() - worker.aborted - ({"pushed"} if side == "sender" else set()):
            assert output(worker.requests[name]) == reference.outputs[name], (order, name)
        assert not worker.engine.groups, order
        assert worker.engine.pool.counts.used == 0
        assert worker.engine.swap_space.num_free == 16
        num_preempted += worker.engine.preemption.counts[not is_swapped]
    assert num_preempted > 10
