"""How the router passes orders to start or end workers on to the process that carries them out."""

from __future__ import annotations

import asyncio

import pytest

from quire.protos import admin_pb2 as pb
from quire.rpc.errors import FailedPrecondition, Unavailable
from quire.services.router.admin.scaling import Scaling


async def follow(scaling: Scaling, name: str) -> asyncio.Task[None]:
    """Follow the orders, and answer each with a name."""

    async def answer() -> None:
        async for order in scaling.orders():
            scaling.answer(pb.AnswerScaleOrderRequest(number=order.number, started=[name]))

    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    return task


async def leave(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_launcher_the_remedy_is_named() -> None:
    with pytest.raises(
        FailedPrecondition, match="start and stop `quire prefill` and `quire decode` yourself"
    ):
        await Scaling().scale(pb.ScaleWorkersRequest())


async def test_the_latest_launcher_that_is_there_gets_the_orders() -> None:
    scaling = Scaling()
    first, second = await follow(scaling, "by the first"), await follow(scaling, "by the second")
    assert (await scaling.scale(pb.ScaleWorkersRequest())).started == ["by the second"]
    await leave(second)
    assert (await scaling.scale(pb.ScaleWorkersRequest())).started == ["by the first"]
    await leave(first)
    with pytest.raises(FailedPrecondition):
        await scaling.scale(pb.ScaleWorkersRequest())


async def test_a_call_fails_when_its_launcher_goes() -> None:
    scaling = Scaling()
    orders = scaling.orders()
    first = asyncio.ensure_future(anext(orders))
    await asyncio.sleep(0)
    calls = [asyncio.create_task(scaling.scale(pb.ScaleWorkersRequest())) for _ in range(3)]
    await first
    await orders.aclose()
    for call in calls:
        with pytest.raises(Unavailable, match="has ended"):
            await call


async def test_problems_reach_the_caller_and_late_answers_nobody() -> None:
    scaling = Scaling()
    orders = scaling.orders()
    first = asyncio.ensure_future(anext(orders))
    await asyncio.sleep(0)
    call = asyncio.create_task(scaling.scale(pb.ScaleWorkersRequest(num_workers={"decode": 0})))
    number = (await first).number
    for _ in range(2):
        scaling.answer(pb.AnswerScaleOrderRequest(number=number, problem="not so"))
    with pytest.raises(FailedPrecondition, match="not so"):
        await call
    scaling.answer(pb.AnswerScaleOrderRequest(number=number))
    await orders.aclose()
