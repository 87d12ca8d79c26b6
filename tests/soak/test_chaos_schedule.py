"""Schedules of faults: the same for the same seed, and only with faults that quire promises to survive."""

from __future__ import annotations

import pytest

from tests.soak.chaos.load import draw_request
from tests.soak.chaos.requests import KINDS, draw_templates
from tests.soak.chaos.schedule import (
    ENDINGS,
    REDIS,
    WEIGHTS,
    Shape,
    draw_schedule,
    num_first,
    rolling_restart,
    spared_processes,
)

SHAPE = Shape(("router-0", "router-1"), ("prefill-0", "prefill-1"), ("decode-0", "decode-1"), has_disk=True)
NUM = 600


def test_a_seed_gives_one_schedule() -> None:
    assert draw_schedule(3, NUM, SHAPE) == draw_schedule(3, NUM, SHAPE)
    assert draw_schedule(3, NUM, SHAPE) != draw_schedule(4, NUM, SHAPE)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = [fault.kind for seed in range(5) for fault in draw_schedule(seed, NUM, SHAPE)]
    assert set(drawn) == set(WEIGHTS)


def test_disks_are_filled_only_where_there_are_some() -> None:
    without = Shape(("router-0",), SHAPE.prefill, SHAPE.decode)
    assert not [fault for fault in draw_schedule(1, NUM, without) if fault.kind == "disk full"]


def test_after_the_first_tenth_one_process_of_each_role_is_spared() -> None:
    spared = spared_processes(2, SHAPE)
    assert [name.partition("-")[0] for name in spared] == ["router", "prefill", "decode"]
    faults = draw_schedule(2, NUM, SHAPE)[num_first(NUM) :]
    ended = {target for fault in faults if fault.kind in ENDINGS for target in fault.targets}
    assert ended == {*SHAPE.routers, *SHAPE.workers} - set(spared)
    stopped = {target for fault in faults if fault.kind == "stop" for target in fault.targets}
    assert stopped == {*SHAPE.routers, *SHAPE.workers}


def test_without_tls_tokens_on_their_way_to_a_router_are_not_damaged() -> None:
    def damaged(shape: Shape) -> set[tuple[bool, bool]]:
        links = [fault.targets for fault in draw_schedule(1, NUM, shape) if fault.kind == "link corrupt"]
        return {(source in shape.routers, server == REDIS) for source, server in links}

    encrypted = Shape(SHAPE.routers, SHAPE.prefill, SHAPE.decode, has_tls=True)
    assert damaged(SHAPE) == {(False, False), (True, True), (False, True)}
    assert damaged(encrypted) == damaged(SHAPE) | {(True, False)}


def test_every_request_has_one_right_answer() -> None:
    templates = draw_templates(5, 4)
    assert [template.kind for template in templates] == [kind for kind in KINDS for _ in range(4)]
    assert templates == draw_templates(5, 4)
    for kind, generation in templates:
        sampling = generation.sampling
        assert sampling.HasField("seed") or sampling.HasField("beam") or sampling.temperature == 0.0, kind
        assert generation.text


def test_a_number_names_the_same_request_in_every_run() -> None:
    drawn = [draw_request(1, number, 30) for number in range(200)]
    assert drawn == [draw_request(1, number, 30) for number in range(200)]
    assert len({sent.manner for sent in drawn}) == 6
    assert drawn != [draw_request(2, number, 30) for number in range(200)]


def test_a_rolling_restart_ends_each_process_once_and_routers_last() -> None:
    faults = rolling_restart(SHAPE)
    assert [fault.targets for fault in faults] == [(name,) for name in (*SHAPE.workers, *SHAPE.routers)]
    assert {fault.kind for fault in faults} == {"terminate"}


def test_longer_pauses_change_nothing_else() -> None:
    usual, slow = draw_schedule(3, NUM, SHAPE), draw_schedule(3, NUM, SHAPE, mean_pause_seconds=11.0)
    assert [fault._replace(pause=0.0) for fault in slow] == [fault._replace(pause=0.0) for fault in usual]
    assert [fault.pause for fault in slow] == pytest.approx([10 * fault.pause for fault in usual])
