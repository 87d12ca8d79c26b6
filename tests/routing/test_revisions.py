"""Which revisions receive requests in an update, and that no plan mixes two of them."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.routing.placement import PlannedPrompt, Planner, PolicyConfig
from quire.routing.policy import IMBALANCE_SECONDS, CandidateWorker, receiving
from quire.routing.pulls import Blocks

BLOCKS = Blocks(16, 1024)
NUM_TOKENS = 320
HASHES = [bytes([index]) * 16 for index in range(NUM_TOKENS // BLOCKS.tokens)]


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (["old"], ["old"], ["old"]),
        (["old", "new"], ["old"], ["old"]),
        (["old"], ["old", "new"], ["old"]),
        (["new", "old"], ["old", "new"], ["old", "new"]),
        (["new"], ["old", "new"], ["new"]),
        # Without a complete revision, decode workers compute the prompts of one.
        (["new"], ["old"], ["old"]),
        (["old"], ["new"], ["new"]),
        ([], ["old", "old", "new"], ["old"]),
        (["old"], [], ["old"]),
        ([], [], []),
    ],
)
def test_complete_revisions_receive_requests_and_others_only_without_one(
    prefill: list[str], decode: list[str], expected: list[str]
) -> None:
    assert receiving(prefill, decode) == expected


def planner() -> Planner:
    return Planner(PolicyConfig(local_prefill_tokens=0), BLOCKS, lambda: 0.0, Random(0))


def candidate(name: str, **state: Any) -> CandidateWorker:
    """Return a worker whose name begins with its revision."""
    return CandidateWorker(name, capacity_tokens=100_000, revision=name.partition("-")[0], **state)


def place(planning: Planner, *workers: CandidateWorker, cached: dict[str, int] | None = None) -> str:
    """Return the revision of the workers that the planner chooses."""
    by_role = [[each for each in workers if each.worker_id.endswith(role)] for role in "pd"]
    placement = planning.place(PlannedPrompt(NUM_TOKENS, HASHES, cached or {}), *by_role)
    assert placement is not None
    return placement.decode.revision


def test_a_new_revision_gets_requests_by_its_load() -> None:
    planning = planner()
    old = [candidate(f"old-{i}-{role}", resident_tokens=20_000) for i in range(3) for role in "pd"]
    assert place(planning, *old, candidate("new-p"), candidate("new-d")) == "new"
    assert place(planning, *old, candidate("new-p"), candidate("new-d", resident_tokens=40_000)) == "old"


def test_a_revision_whose_prefill_workers_are_jammed_is_passed_over() -> None:
    planning = planner()
    jam = round(planning.pending_seconds("", 1) ** -1 * (IMBALANCE_SECONDS + 1))
    old = candidate("old-p"), candidate("old-d", resident_tokens=20_000)
    assert place(planning, *old, candidate("new-p"), candidate("new-d")) == "new"
    assert place(planning, *old, candidate("new-p", pending_tokens=jam), candidate("new-d")) == "old"


class State(NamedTuple):
    """A worker's state at one time."""

    is_ready: bool
    is_unhealthy: bool
    num_cached: int
    pending_tokens: int
    resident_tokens: int


STATES = st.builds(
    State, st.booleans(), st.booleans(), st.integers(0, 20), st.integers(0, 99_999), st.integers(0, 99_999)
)
NAMES = st.sampled_from([f"{revision}-{i}-{role}" for revision in ("a", "b") for i in "01" for role in "pd"])
CHANGES = st.lists(st.tuples(NAMES, st.none() | STATES), min_size=1, max_size=30)


@given(CHANGES, st.booleans())
def test_a_plan_never_mixes_revisions_and_there_is_one_while_a_revision_is_complete(
    changes: list[tuple[str, State | None]], must_be_local: bool
) -> None:
    planning, present = planner(), dict[str, State]()
    for name, state in changes:
        present.pop(name, None)  # A worker that joins again comes last.
        if state is None:
            planning.forget(name)
        else:
            present[name] = state
        ready = [name for name, each in present.items() if each.is_ready]
        workers = {
            name: candidate(
                name, pending_tokens=each.pending_tokens, resident_tokens=each.resident_tokens
            )._replace(is_unhealthy=each.is_unhealthy)
            for name, each in present.items()
            if each.is_ready
        }
        cached = {name: each.num_cached * BLOCKS.tokens for name, each in present.items()}
        prompt = PlannedPrompt(NUM_TOKENS, HASHES, cached, must_be_local)
        prefill, decode = ([workers[each] for each in ready if each.endswith(role)] for role in "pd")
        placement = planning.place(prompt, prefill, decode)
        complete = {each.revision for each in prefill} & {each.revision for each in decode}
        assert (placement is not None) == bool(decode)
        if placement is None:
            continue
        computing, peer = placement.estimate.candidate, placement.estimate.peer
        used = {placement.decode.revision, computing.revision}
        used |= {workers[peer.worker_id].revision} if peer else set()
        assert len(used) == 1, "two revisions share no block"
        assert not complete or used <= complete
