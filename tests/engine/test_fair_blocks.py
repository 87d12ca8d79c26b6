"""Blocks are given first to clients that hold few, so that a client which fills the pool waits for itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import TOKEN, make_constant_engine

BLOCK_SIZE, NUM_BLOCKS = 4, 40
MOST_STEPS_LOST = 3
"""Steps in which a small request waits until another one has given up its blocks."""
NUM_COSTLY, COSTLY_TOKENS, SMALL_TOKENS = 12, 56, 8


def request(name: str, client: str, num_prompt: int, num_output: int) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    # Each prompt has a root of its own, so that none finds another one's blocks.
    return Sequence(name, [2] * num_prompt, num_prompt, params, name.encode(), client=client)


@pytest.fixture(params=[0, NUM_BLOCKS], ids=["recompute", "swap"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Return an engine whose pool is full of a costly client's requests."""
    engine = make_constant_engine(16, 64, num_blocks=NUM_BLOCKS, num_swap_blocks=request.param)
    for number in range(NUM_COSTLY):
        engine.add_request(make_costly(number))
    while not engine.preemption.num_preempted:
        engine.step()
    return engine


def make_costly(number: int) -> Sequence:
    return request(f"costly-{number}", "costly", 4, COSTLY_TOKENS)


def steps_until_ended(engine: Engine, name: str) -> int:
    num_steps = 0
    while name in engine.groups:
        engine.step()
        engine.check_conservation()
        num_steps += 1
    return num_steps


def run_to_end(engine: Engine) -> dict[str, int]:
    """Return how many tokens each request got."""
    sequences = {name: group.prompt for name, group in engine.groups.items()}
    while not engine.is_idle:
        engine.step()
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    return {name: each.num_tokens - each.num_prompt_tokens for name, each in sequences.items()}


def test_a_small_client_does_not_wait_for_one_that_fills_the_pool(engine: Engine) -> None:
    for number in range(3):
        small = request(f"small-{number}", "small", 8, SMALL_TOKENS)
        engine.add_request(small)
        assert steps_until_ended(engine, small.attempt_id) <= SMALL_TOKENS + MOST_STEPS_LOST
        assert small.token_ids[8:] == [TOKEN] * SMALL_TOKENS
    assert set(run_to_end(engine).values()) == {COSTLY_TOKENS}


def test_nor_does_its_transfer(engine: Engine) -> None:
    small = request("small", "small", 8, SMALL_TOKENS)
    engine.transfers.accept(small)
    outcome: list[bool] = []
    engine.transfers.reserve("small", outcome.append)
    for _ in range(2):
        engine.step()
    assert outcome == [True]
    engine.transfers.admit("small", TOKEN)
    assert steps_until_ended(engine, "small") <= SMALL_TOKENS + MOST_STEPS_LOST
    assert set(run_to_end(engine).values()) == {COSTLY_TOKENS}


def test_requests_of_one_client_keep_their_order(engine: Engine) -> None:
    last = request("last", "costly", 8, SMALL_TOKENS)
    engine.add_request(last)
    steps_until_ended(engine, "costly-0")
    assert "last" in engine.groups
    assert not last.block_table


@pytest.mark.parametrize(
    ("num_blocks", "num_output", "passes"), [(1, 16, True), (3, 16, False), (1, 30, False)]
)
def test_a_transfer_passes_another_clients_only_where_older_requests_would_fit_beside(
    num_blocks: int, num_output: int, passes: bool
) -> None:
    """The sender of the older one may have to finish it first, and holds its blocks meanwhile.

    The older one may wait until the running request has ended, which may need all blocks for 30 tokens.
    """
    engine = make_constant_engine(4, 64)
    engine.add_request(request("running", "costly", 12, num_output))
    engine.step()
    outcomes: dict[str, bool] = {}
    for name, client, size in (("old", "costly", 6), ("new", "small", num_blocks)):
        engine.transfers.accept(request(name, client, size * BLOCK_SIZE, 1))
        engine.transfers.reserve(name, lambda given, name=name: outcomes.update({name: given}))  # type: ignore[misc]
    engine.step()
    assert outcomes == ({"new": True} if passes else {})


def reserve(engine: Engine, name: str, client: str, num_blocks: int, outcomes: dict[str, bool]) -> None:
    engine.transfers.accept(request(name, client, num_blocks * BLOCK_SIZE, 1))
    engine.transfers.reserve(name, lambda given: outcomes.update({name: given}))
    engine.transfers.grant_blocks()


def test_a_clients_transfers_leave_as_many_blocks_free_as_they_hold() -> None:
    engine = make_constant_engine(4, 64, num_blocks=NUM_BLOCKS)
    outcomes: dict[str, bool] = {}
    for number in range(4):
        reserve(engine, f"flood-{number}", "flood", 8, outcomes)
    assert outcomes == {"flood-0": True, "flood-1": True}
    for number in range(2):
        reserve(engine, f"small-{number}", "small", 6, outcomes)
    assert outcomes == {"flood-0": True, "flood-1": True, "small-0": True, "small-1": True}
    engine.transfers.admit("flood-0", TOKEN)
    engine.transfers.grant_blocks()
    assert "flood-2" not in outcomes  # eight blocks would be left, and the client would hold sixteen
    engine.abort("small-1")
    engine.abort("small-0")
    engine.transfers.grant_blocks()
    assert outcomes["flood-2"]
    assert "flood-3" not in outcomes
    engine.check_conservation()


@pytest.mark.parametrize(("client", "num_granted"), [("flood", 1), ("", 2)])
def test_one_transfer_may_take_more_than_half_of_the_pool_and_without_tenants_all_may(
    client: str, num_granted: int
) -> None:
    engine = make_constant_engine(4, 64, num_blocks=NUM_BLOCKS, max_model_len=200)
    outcomes: dict[str, bool] = {}
    reserve(engine, "large", client, 30, outcomes)
    reserve(engine, "small", client, 8, outcomes)
    assert len(outcomes) == num_granted


@dataclass(eq=False)
class Push:
    """A prompt that one worker computes for another, so that it needs blocks of both."""

    receiver: Engine
    prompt: Sequence
    num_blocks: int
    is_held: bool = False
    outcomes: list[bool] = field(default_factory=list)


@dataclass(eq=False)
class Sender:
    """Gives its blocks to prompts in the order of arrival, and keeps them until the receiver has theirs."""

    num_free: int = NUM_BLOCKS
    pushes: list[Push] = field(default_factory=list)

    def deliver(self) -> bool:
        """Deliver what is computed and has blocks of its receiver; return whether there was anything."""
        for push in self.pushes:
            if not push.is_held:
                if push.num_blocks > self.num_free:
                    break
                push.is_held, self.num_free = True, self.num_free - push.num_blocks
        done = [push for push in self.pushes if push.is_held and push.outcomes]
        for push in done:
            assert push.outcomes == [True]
            push.receiver.transfers.admit(push.prompt.attempt_id, TOKEN)
            push.receiver.transfers.grant_blocks()
            self.pushes.remove(push)
            self.num_free += push.num_blocks
        return bool(done)


SIZES = st.integers(1, NUM_BLOCKS - 2)
WORKERS = st.integers(0, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), WORKERS, WORKERS, SIZES, st.booleans()), max_size=30))
def test_two_workers_never_wait_for_each_others_blocks(pushes: list[tuple[str, int, int, int, bool]]) -> None:
    """Each push opens at its receiver when it enters the queue of its sender."""
    receivers = [make_constant_engine(4, 64, num_blocks=NUM_BLOCKS, max_model_len=200) for _ in range(2)]
    senders = [Sender(), Sender()]

    def advance() -> bool:
        is_delivered = [sender.deliver() for sender in senders]
        for receiver in receivers:
            receiver.step()
            receiver.check_conservation()
        return any(is_delivered) or not all(receiver.is_blocked for receiver in receivers)

    for number, (client, sender, receiver, num_blocks, is_followed) in enumerate(pushes):
        prompt = request(str(number), client, num_blocks * BLOCK_SIZE, 6)
        push = Push(receivers[receiver], prompt, num_blocks)
        senders[sender].pushes.append(push)
        push.receiver.transfers.accept(prompt)
        push.receiver.transfers.reserve(prompt.attempt_id, push.outcomes.append)
        push.receiver.transfers.grant_blocks()
        if is_followed:
            advance()
    while advance():
        pass
    assert not any(sender.pushes for sender in senders)
    assert not any(receiver.groups for receiver in receivers)


def test_a_preempted_group_and_a_transfer_never_wait_for_each_other() -> None:
    """A request of 31 blocks grows, and gives up its blocks since a granted transfer leaves it no room.

    An older transfer of its client waits behind it, and the sender of both transfers keeps their order.
    """
    small = [("a", 0, 0, 1, False)] * 8
    pushes = [*small, ("a", 0, 0, 2, False), ("b", 0, 1, 31, False), ("b", 0, 1, 23, False)]
    pushes += [("a", 0, 0, 18, False), ("a", 0, 1, 8, False)]
    test_two_workers_never_wait_for_each_others_blocks.hypothesis.inner_test(pushes)  # type: ignore[attr-defined]
