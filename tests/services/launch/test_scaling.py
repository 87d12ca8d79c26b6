"""How orders become workers that start or leave, with a launcher that only notes what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from quire.protos import admin_pb2 as pb
from quire.services.launch.launcher import Event, NotStarted, Started, Stopped, Waitable
from quire.services.launch.scale_orders import ScaleOrder
from quire.services.launch.scaling import MOST, Scaling
from quire.services.worker.config import WorkerConfig


class Noted:
    """A launcher without processes."""

    host = "127.0.0.1"
    seconds: float | None = None

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.started: list[str] = []
        self.stopped: list[str] = []

    def start(self, configs: Mapping[str, WorkerConfig]) -> None:
        self.names |= set(configs)
        self.started += configs

    def stop(self, name: str) -> None:
        self.stopped.append(name)

    def waitables(self) -> list[Waitable]:
        return []

    def events(self) -> list[Event]:
        return []


class Answers(list[pb.AnswerScaleOrderRequest]):
    """The results, in order."""

    def order(self, **num_workers: int) -> ScaleOrder:
        return ScaleOrder(num_workers, self.append)


Begun = tuple[Noted, list[str], Answers, Scaling]


@pytest.fixture
def begin() -> Callable[..., Begun]:
    def start(*names: str) -> Begun:
        launcher, drained = Noted(*names), list[str]()
        scaling = Scaling(launcher, lambda name: WorkerConfig(model="m", role="decode"), drained.append)
        return launcher, drained, Answers(), scaling

    return start


def test_orders_are_carried_out_one_after_the_other(begin: Callable[..., Begun]) -> None:
    launcher, drained, answers, scaling = begin("prefill-0", "decode-0")
    scaling.take([answers.order(decode=3), answers.order(decode=1, prefill=0)])
    assert launcher.started == ["decode-1", "decode-2"]
    scaling.note(Started("decode-2", None))
    assert not answers
    assert not drained
    scaling.note(Started("decode-1", None))
    assert list(answers[0].started) == ["decode-2", "decode-1"]
    assert drained == launcher.stopped == ["decode-2", "decode-1", "prefill-0"]
    for name in drained:
        launcher.names.discard(name)
        scaling.note(Stopped(name))
    assert list(answers[1].left) == ["decode-2", "decode-1", "prefill-0"]


def test_an_order_that_changes_nothing_is_answered_at_once(begin: Callable[..., Begun]) -> None:
    _, _, answers, scaling = begin("prefill-0", "decode-0")
    scaling.take([answers.order(decode=1), answers.order()])
    assert answers == [pb.AnswerScaleOrderRequest()] * 2


@pytest.mark.parametrize(
    "wrong", [{"decode": 0}, {"decode": MOST + 1}, {"prefill": 2**32 - 1}, {"router": 1}]
)
def test_impossible_numbers_change_nothing(begin: Callable[..., Begun], wrong: dict[str, int]) -> None:
    launcher, drained, answers, scaling = begin("decode-0")
    scaling.take([answers.order(**{"prefill": 1, **wrong})])
    assert "prefill 0 to 256 and decode 1 to 256" in answers[0].problem
    assert not launcher.started
    assert not drained


def test_a_worker_that_does_not_start_is_withdrawn(begin: Callable[..., Begun]) -> None:
    launcher, drained, answers, scaling = begin("decode-0")
    scaling.take([answers.order(decode=3)])
    scaling.note(NotStarted("decode-1", RuntimeError("no memory")))
    scaling.note(Started("decode-2", None))
    assert drained == ["decode-1"]
    assert not answers
    launcher.names.discard("decode-1")
    scaling.note(Stopped("decode-1"))
    assert answers[0].problem == "decode-1 did not start: no memory"
    assert list(answers[0].started) == ["decode-2"]


def test_the_restart_of_another_worker_is_not_counted(begin: Callable[..., Begun]) -> None:
    _, _, answers, scaling = begin("decode-0")
    scaling.take([answers.order(decode=2)])
    scaling.note(NotStarted("decode-0", RuntimeError("again")))
    scaling.note(Started("decode-0", None))
    assert not answers
    scaling.note(Started("decode-1", None))
    assert answers == [pb.AnswerScaleOrderRequest(started=["decode-1"])]
