"""Hostile formats against real processes: each costs its own request, and no worker."""

from __future__ import annotations

import asyncio
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.client import InvalidRequest
from quire.protos import worker_pb2
from quire.services.local.stack import RunningStack
from tests.testing.stacks import connect

CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3500)) + 'r3500: "a"\n'
# Below the limit of rules, and more than the stack of a trial holds.
SHORT_CHAIN = "start: r0\n" + "".join(f"r{i}: (r{i + 1})\n" for i in range(900)) + 'r900: "a"\n'
GREEDY_REGEX = "a?" * 15000 + "a" * 15000
AMBIGUOUS = 'start: a+\na: b | c | d\nb: a "x"? | "x" a | "x"\nc: b a | "x" b\nd: c? b? a? "x"\n'
"""Every text of x has very many derivations: 20 tokens are more than the parser's rows hold."""


def memory(process: BaseProcess) -> int:
    """Return how many MiB a process holds."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


async def test_hostile_formats_end_no_worker(demo_stack: RunningStack) -> None:
    async with connect(demo_stack) as (client, workers):
        before = {
            name: (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).epoch
            for name, stub in workers.items()
        }
        used = {name: memory(worker.process) for name, worker in demo_stack.workers.items()}
        every_kind: list[dict[str, Any]] = [
            {"grammar": CHAIN},
            {"grammar": SHORT_CHAIN},
            {"regex": GREEDY_REGEX},
            {"json_schema": '{"items":' * 6000 + "{}" + "}" * 6000},
            {"json_schema": '{"type":"integer","multipleOf":99999989}'},
        ]
        for formats in every_kind:
            (kind,) = formats
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("Say a.", max_tokens=4, **formats)
            assert caught.value.field == f"format.{kind}"
        answers = await asyncio.gather(
            *(client.generate("Say a.", max_tokens=8, regex="a{1,3}") for _ in range(4))
        )
        assert all(set(answer.text) == {"a"} for answer in answers)
        for name, stub in workers.items():
            info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
            assert info.epoch == before[name]
            assert memory(demo_stack.workers[name].process) < used[name] + 120


@pytest.mark.parametrize("depth", [200, 3_000])
async def test_a_schema_that_nests_deeply_is_a_clients_mistake(demo_stack: RunningStack, depth: int) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    form = '{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + "}}"
    body = (
        '{"model":"demo","messages":[{"role":"user","content":"x"}],"max_tokens":4,"response_format":'
        + form
        + "}"
    )
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{demo_stack.http_address}/v1/chat/completions",
            data=body,
            headers={"Content-Type": "application/json"},
        ) as response,
    ):
        assert response.status == 400
        assert "recursion limit" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("n", [1, 3])
async def test_an_answer_that_breaks_off_is_an_error(demo_stack: RunningStack, n: int) -> None:
    wanted: dict[str, Any] = {"temperature": 0.0, "logit_bias": {1: -100.0}, "max_tokens": 100, "n": n}
    async with connect(demo_stack) as (client, workers):
        epochs = {
            name: (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).epoch
            for name, stub in workers.items()
        }
        with pytest.raises(InvalidRequest, match="cannot be continued after"):
            await client.generate("Say a.", grammar=AMBIGUOUS, **wanted)
        with pytest.raises(InvalidRequest, match="cannot be continued after"):
            async for delta in client.stream("Say a.", grammar=AMBIGUOUS, **wanted):
                assert delta.finish_reason is None
        for stream in (False, True):
            text = await _complete(demo_stack, stream=stream, n=n)
            assert "cannot be continued after" in text
            assert '"finish_reason":"stop"' not in text.replace(" ", "")
        answer = await client.generate("Say a.", max_tokens=8, regex="a{1,3}")
        assert set(answer.text) == {"a"}
        for name, stub in workers.items():
            info = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
            assert info.epoch == epochs[name]


async def _complete(demo_stack: RunningStack, *, stream: bool, n: int) -> str:
    body = {
        "model": "demo",
        "prompt": "Say a.",
        "max_tokens": 100,
        "temperature": 0,
        "n": n,
        "stream": stream,
        "logit_bias": {"1": -100},
        "structured_outputs": {"grammar": AMBIGUOUS},
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{demo_stack.http_address}/v1/completions", json=body) as response,
    ):
        assert response.status == (200 if stream else 400)
        return await response.text()
