"""Steps are divided fairly among clients: by the turns of groups, and in the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.engine import Engine
from quire.engine.scheduling.fair_turns import CREDIT_STEPS, SHORT_STEP, divided, may_start
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.constant_engine import make_constant_engine
from tests.testing.tiny_engine import (
    Outputs,
    add_tokens,
    make_engine,
    make_prompt,
    make_request,
    run,
    updates_of,
)

CAPACITY = 16
KINDS = st.tuples(st.sampled_from("abc"), st.integers(2, CAPACITY), st.booleans()) | st.tuples(
    st.sampled_from("abc"), st.just(1), st.just(False)
)


def make_group(client: str, num_sequences: int, is_beam: bool = False, name: str = "r") -> SequenceGroup:
    if is_beam:
        beam = BeamParams(num_sequences)
        params = SamplingParams(beam=beam)
    else:
        params = SamplingParams(n=num_sequences)
    prompt = Sequence(name, [5], 1, params, b"", client=client)
    group = SequenceGroup(prompt, [prompt])
    if is_beam:
        group.beam = BeamSearch(beam, 8, frozenset())
    return group


@given(st.lists(KINDS, min_size=1, max_size=10))
def test_turns_fill_a_step_and_every_client_gets_one(kinds: list[tuple[str, int, bool]]) -> None:
    groups = [make_group(*kind, name=str(index)) for index, kind in enumerate(kinds)]
    left_out = Counter[SequenceGroup]()
    for step in range(1, 4 * len(groups)):
        turns = divided(sorted(groups, key=lambda group: group.turn), CAPACITY)
        assert sum(turns.values()) <= CAPACITY
        num_free = CAPACITY - sum(turns.values())
        for group in groups:
            assert turns[group] <= group.num_slots
            if group.beam is not None:
                assert turns[group] in (0, group.num_slots)
                assert turns[group] or group.num_slots > num_free
            else:
                assert turns[group] == group.num_slots or not num_free
            left_out[group] = 0 if turns[group] else left_out[group] + 1
            assert left_out[group] <= len(groups)
            if turns[group]:
                group.turn = step


def test_a_small_client_has_its_sequence_beside_many_and_turns_beside_beams() -> None:
    samples, small = make_group("costly", CAPACITY), make_group("small", 1)
    assert divided([samples, small], CAPACITY) == {samples: CAPACITY - 1, small: 1}
    beams = make_group("costly", CAPACITY, is_beam=True)
    assert divided([beams, small], CAPACITY) == {beams: CAPACITY, small: 0}
    assert divided([small, beams], CAPACITY) == {beams: 0, small: 1}


def test_requests_that_start_although_a_step_is_full() -> None:
    ones = [make_group("costly", 1, name=str(index)) for index in range(CAPACITY)]
    assert may_start(make_group("small", 1), ones, CAPACITY)
    assert may_start(make_group("small", CAPACITY), ones, CAPACITY)
    assert not may_start(make_group("costly", 1), ones, CAPACITY)
    # In this way, a client gets no more than its share.
    half = make_group("small", CAPACITY // 2)
    assert not may_start(make_group("small", CAPACITY), [half, *ones], CAPACITY)
    # Of one client, a small request may start beside a costly one, but no second costly one.
    costly = make_group("", CAPACITY)
    assert may_start(make_group("", 1), [costly], CAPACITY)
    assert not may_start(make_group("", CAPACITY), [costly], CAPACITY)


def costly_and_small() -> list[Sequence]:
    requests = [
        make_request("n", make_prompt(20, 1), n=4, seed=1, max_tokens=12),
        make_request("n2", make_prompt(20, 2), n=4, seed=2, max_tokens=12),
        make_request("beams", make_prompt(20, 3), beam=BeamParams(4), max_tokens=12),
        make_request("prompt", make_prompt(300, 4), seed=4, max_tokens=4),
    ]
    for request in requests:
        request.client = "costly"
    small = make_request("small", make_prompt(10, 5), seed=5, max_tokens=6)
    small.client = "small"
    return [*requests, small]


def test_tokens_are_the_same_and_a_small_client_ends_first(load: Callable[[str], LoadedModel]) -> None:
    expected: Outputs = {}
    for request in costly_and_small():
        expected |= run(make_engine(load("llama")), request)
    engine = make_engine(load("llama"), max_num_seqs=4, max_num_batched_tokens=16)
    outputs: Outputs = {}
    ended: list[str] = []
    for update in updates_of(engine, *costly_and_small()):
        add_tokens(outputs, update)
        if update.status.is_finished:
            ended.append(update.sequence.attempt_id)
        assert engine.num_stepped <= 4
    assert ended[0] == "small"
    assert outputs == expected


def constant_request(name: str, n: int, num_tokens: int) -> Sequence:
    params = SamplingParams(temperature=1.0, seed=1, n=n, max_tokens=num_tokens, ignore_eos=True)
    return Sequence(name, [2, 3], 2, params, name.encode())


def num_outputs(engine: Engine, num_steps: int) -> Counter[str]:
    """Run steps; return how many tokens each request got."""
    outputs = Counter[str]()
    for _ in range(num_steps):
        for update in engine.step():
            outputs[update.sequence.attempt_id] += len(update.tokens)
        engine.check_conservation()
    return outputs


def test_a_small_request_passes_costly_ones_of_its_client_that_wait() -> None:
    engine = make_constant_engine(4, 64, num_blocks=200)
    for name in ("costly", "waiting", "waiting-2"):
        engine.add_request(constant_request(name, 4, 40))
    num_outputs(engine, 3)
    engine.add_request(constant_request("small", 1, 8))
    outputs = num_outputs(engine, 10)
    assert outputs["small"] == 8
    assert outputs["costly"] >= 3 * 8
    assert not outputs["waiting"]


def test_a_costly_request_starts_when_a_sequence_of_its_client_is_free() -> None:
    engine = make_constant_engine(4, 64, num_blocks=200)
    for index in range(3):
        engine.add_request(constant_request(f"old-{index}", 1, 40))
    engine.add_request(constant_request("costly", 4, 40))
    engine.add_request(constant_request("new", 1, 8))
    outputs = num_outputs(engine, 12)
    assert outputs["costly"]
    assert outputs["new"] == 8


def test_small_requests_pass_a_costly_one_only_while_a_costly_one_runs_that_is_older() -> None:
    engine = make_constant_engine(4, 64, num_blocks=200)
    engine.add_request(constant_request("costly", 2, 20))
    engine.add_request(constant_request("old", 2, 20))
    num_outputs(engine, 1)
    engine.add_request(constant_request("waiting", 4, 20))
    outputs = Counter[str]()
    for index in range(60):  # one small request ends each few steps, and another comes
        engine.add_request(constant_request(f"small-{index}", 1, 6))
        outputs += num_outputs(engine, 2)
    assert outputs["waiting"]


def prompt_of(name: str, client: str, num_tokens: int, num_answer: int = 1, weight: int = 1) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=num_answer, ignore_eos=True)
    sequence = Sequence(name, [2] * num_tokens, num_tokens, params, name.encode(), client=client)
    sequence.weight = weight
    return sequence


STEP_TOKENS, MOST_SEQS = 128, 8
FLOODS = {"long prompts": (8, 400, 1), "many answers": (40, 8, 200), "tiny requests": (40, 4, 1)}
"""Number of requests at a time, tokens of their prompts, tokens of their answers."""


@pytest.mark.parametrize(
    ("flood", "on_prefill_worker"),
    [
        ("long prompts", False),
        ("long prompts", True),
        pytest.param("many answers", False, marks=pytest.mark.slow),
        pytest.param("tiny requests", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("begins", ["flood", "small"])
def test_a_flood_delays_only_itself(flood: str, on_prefill_worker: bool, begins: str) -> None:
    """Tokens that are computed from the arrival of a small client's prompt until its first token.

    The small client asks for less than half of all tokens, its share. Its requests arrive during a step.
    """
    num_flooding, num_prompt, num_answer = FLOODS[flood]
    num_small, small_tokens, pause_tokens = 20, 640, 1400
    engine = make_constant_engine(MOST_SEQS, STEP_TOKENS, num_blocks=4000, max_model_len=1000)
    num_sent = num_done = 0
    waited: list[int] = []
    arrived, computed, due = 0, 0, 2 * CREDIT_STEPS * STEP_TOKENS if begins == "flood" else 0
    num_alone = 0 if begins == "flood" else CREDIT_STEPS
    while len(waited) < num_small + num_alone:
        is_flooded = len(waited) >= num_alone
        if not is_flooded and not engine.groups:
            computed = due  # the small client pauses
        while is_flooded and sum(g.client == "flood" for g in engine.groups.values()) < num_flooding:
            sequence = prompt_of(f"flood-{num_sent}", "flood", num_prompt, num_answer)
            sequence.stops_after_prefill = on_prefill_worker
            engine.add_request(sequence)
            num_sent += 1
        small = f"small-{len(waited)}"
        if computed >= due and small not in engine.groups:
            # It arrived at the beginning of the step that has just ended.
            arrived = computed - engine.num_step_tokens
            engine.add_request(prompt_of(small, "small", small_tokens))
        for update in engine.step():
            name = update.sequence.attempt_id
            if update.status.is_finished:
                num_done += 1
                engine.abort(name)
                if name == small:
                    waited.append(computed + engine.num_step_tokens - arrived)
                    due = computed + pause_tokens
        computed += engine.num_step_tokens
    assert num_done > num_small  # the flood goes on meanwhile
    # The first one waits for a full step: until then, the engine knows of no other client.
    assert max(waited[1:]) <= 1.2 * small_tokens


def test_small_requests_without_end_do_not_starve_a_long_one() -> None:
    engine = make_constant_engine(MOST_SEQS, STEP_TOKENS, num_blocks=4000, max_model_len=1000)
    num_sent = computed = 0
    while computed < CREDIT_STEPS * STEP_TOKENS:
        while sum(group.client == "small" for group in engine.groups.values()) < 2 * MOST_SEQS:
            engine.add_request(prompt_of(f"small-{num_sent}", "small", 40))
            num_sent += 1
        if num_sent == 2 * MOST_SEQS:
            engine.add_request(prompt_of("long", "long", 900))
        ended = {update.sequence.attempt_id for update in engine.step() if update.status.is_finished}
        computed += engine.num_step_tokens
        if "long" in ended:
            break
    # The others are served as many tokens first as it asks for, and then one for each of its own.
    assert computed <= 3 * 900 + STEP_TOKENS


@pytest.mark.parametrize("num_elsewhere", [0, 10_000])
def test_prompts_that_wait_in_the_router_count_for_their_client(num_elsewhere: int) -> None:
    """A flood that was not here for a while lags behind, but has more to compute than the engine sees."""
    engine = make_constant_engine(MOST_SEQS, STEP_TOKENS, num_blocks=4000, max_model_len=1000)
    engine.add_request(prompt_of("flood-0", "flood", 40))
    for number in range(8):
        engine.add_request(prompt_of(f"small-{number}", "small", 400))
    while engine.groups:
        engine.step()
    flood = prompt_of("flood-1", "flood", 900)
    engine.add_request(replace(flood, num_waiting_tokens=num_elsewhere))
    engine.step()
    engine.add_request(prompt_of("small-8", "small", 400))
    ended: list[str] = []
    while engine.groups:
        ended += [update.sequence.attempt_id for update in engine.step() if update.status.is_finished]
    assert ended == (["small-8", "flood-1"] if num_elsewhere else ["flood-1", "small-8"])


def test_clients_that_always_want_more_get_tokens_by_weight_and_pay_nothing_for_cached_ones() -> None:
    engine = make_constant_engine(MOST_SEQS, STEP_TOKENS, num_blocks=4000, max_model_len=1000)
    weights = {"one": 1, "three": 3, "cached": 1}
    tokens = Counter[str]()
    cached = [3] * 400
    num_sent = 0
    num_warm, num_steps = 50, 1000
    for number in range(num_warm + num_steps):
        for client, weight in weights.items():
            while sum(group.client == client for group in engine.groups.values()) < 2:
                num_sent += 1
                sequence = prompt_of(f"{client}-{num_sent}", client, 400, weight=weight)
                if client == "cached":
                    new = [num_sent // 7**place % 7 for place in range(40)]
                    sequence = replace(sequence, token_ids=cached + new, num_prompt_tokens=440)
                    sequence.root_hash = b"same"
                engine.add_request(sequence)
        before = {g.attempt_id: g.prompt.num_computed_tokens for g in engine.groups.values()}
        groups = list(engine.groups.values())
        engine.step()
        if number < num_warm:
            continue
        for group in groups:
            num_before = max(before[group.attempt_id], group.prompt.num_cached_tokens)
            tokens[group.client] += max(0, group.prompt.num_computed_tokens - num_before)
    assert tokens["three"] == pytest.approx(3 * tokens["one"], rel=0.05)
    assert tokens["cached"] == pytest.approx(tokens["one"], rel=0.05)
    assert sum(tokens.values()) >= num_steps * STEP_TOKENS / SHORT_STEP
