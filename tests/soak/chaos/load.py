"""Clients of a chaos run: they send requests, behave well or badly, and check every answer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

import grpc.aio

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from quire.rpc.errors import SUSPECTED, TOO_LATE
from tests.soak.chaos.answers import add_message, difference
from tests.soak.chaos.cluster import Cluster
from tests.soak.chaos.requests import Template

PATIENT_SECONDS = 120.0
"""Deadline of a request that must be answered; far more than any fault lasts."""
MARGIN_SECONDS = 10.0
"""A client whose call is still open so long after its deadline ends it."""
SALTED_SHARE = 0.5
"""Share of the requests that share no cached block with earlier ones."""

Manner = Literal["whole", "stream", "pauses", "hasty", "leaves", "reads nothing"]
MANNERS: dict[Manner, float] = {
    "whole": 0.3,
    "stream": 0.4,
    "pauses": 0.08,
    "hasty": 0.08,
    "leaves": 0.1,
    "reads nothing": 0.04,
}
"""How clients behave, and how often. One that pauses reads nothing for a while in the middle of a stream; a
hasty one has a deadline that may pass."""

RIGHT, LEFT, DEADLINE, ROUTER_GONE, SUSPECT = "right", "client left", "deadline", "router gone", "suspected"
WRONG, LATE, LOST = "WRONG", "LATE", "LOST"
DEFECTS = frozenset({WRONG, LATE, LOST})


class Sent(NamedTuple):
    """A request that is sent: what, how, and with which deadline."""

    number: int
    template: int
    manner: Manner
    deadline_seconds: float
    pause_seconds: float
    salt: str


def draw_request(seed: int, number: int, num_templates: int) -> Sent:
    """Return a request of the load; a number gives the same request in every run of a seed."""
    random = Random(f"load-{seed}-{number}")
    manner = random.choices(list(MANNERS), list(MANNERS.values()))[0]
    return Sent(
        number,
        random.randrange(num_templates),
        manner,
        random.uniform(0.05, 3.0) if manner == "hasty" else PATIENT_SECONDS,
        random.uniform(0.0, 1.0) if manner == "leaves" else random.uniform(0.5, 3.0),
        f"salt-{number}" if random.random() < SALTED_SHARE else "",
    )


@dataclass
class LoadReport:
    """What became of the requests.

    Attributes:
        outcomes: number of requests by kind and outcome.
        seconds: time of each request that was answered right and was not held up by its client.
        num_retried: answers that needed more than one attempt.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    num_retried: int = 0


class Load:
    """Sends requests to a cluster and compares the answers with the right ones."""

    def __init__(self, cluster: Cluster, templates: Sequence[Template], seed: int) -> None:
        self._cluster = cluster
        self._templates = templates
        self._seed = seed
        self._right: list[pb.GenerateResponse] = []
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._next_number = 0
        self.undisturbed = LoadReport()
        self.report = LoadReport()

    async def close(self) -> None:
        """Close the connections to the routers."""
        for channel in self._channels.values():
            await channel.close(None)

    async def learn_answers(self, concurrency: int) -> None:
        """Ask for the right answer of each request, while nothing disturbs the cluster."""
        limit = asyncio.Semaphore(concurrency)

        async def ask(template: Template) -> pb.GenerateResponse:
            async with limit:
                begin = time.monotonic()
                answer = await self._stub(self._cluster.shape.routers[0]).Generate(
                    pb.GenerateRequest(generation=template.generation), timeout=PATIENT_SECONDS
                )
                self.undisturbed.seconds.append(time.monotonic() - begin)
                return answer  # type: ignore[no-any-return]

        self._right = list(await asyncio.gather(*map(ask, self._templates)))

    async def run(self, concurrency: int, has_ended: Callable[[], bool]) -> None:
        """Send requests, a fixed number at a time, until the function returns true; then await the rest."""

        async def client() -> None:
            while not has_ended():
                number, self._next_number = self._next_number, self._next_number + 1
                await self._send(draw_request(self._seed, number, len(self._templates)))

        await asyncio.gather(*(client() for _ in range(concurrency)))

    # --- one request ----------------------------------------------------------------------------------

    async def _send(self, sent: Sent) -> None:
        router = await self._router(sent)
        num_starts = self._cluster.processes[router].num_starts
        template, journal = self._templates[sent.template], self._cluster.journal
        begin = time.monotonic()
        journal.record("request", router=router, kind=template.kind, **sent._asdict())
        try:
            async with asyncio.timeout(sent.deadline_seconds + MARGIN_SECONDS):
                answer = await self._ask(sent, router)
            outcome, details = self._judge(answer, sent)
        except TimeoutError:
            outcome, details = LATE, f"no end {MARGIN_SECONDS:.0f} s after the deadline"
        except grpc.aio.AioRpcError as error:
            has_gone = (
                self._cluster.processes[router].is_ending
                or self._cluster.processes[router].num_starts != num_starts
            )
            outcome, details = outcome_of_error(error, sent, router_has_gone=has_gone)
        seconds = time.monotonic() - begin
        self.report.outcomes[template.kind, outcome] += 1
        if outcome == RIGHT and sent.manner in ("whole", "stream"):
            self.report.seconds.append(seconds)
        journal.record("answer", number=sent.number, outcome=outcome, details=details, took=round(seconds, 3))
        if outcome in DEFECTS:
            what = f"request {sent.number} ({template.kind}, {sent.manner})"
            journal.record_defect(f"{what} {outcome} after {seconds:.1f} s: {details}")

    async def _router(self, sent: Sent) -> str:
        """Return the router for a request, once there is one."""
        while True:
            if serving := self._cluster.serving_routers():
                return serving[sent.number % len(serving)]
            await asyncio.sleep(0.05)

    def _stub(self, router: str) -> GenerationServiceStub:
        if router not in self._channels:
            options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
            address = f"127.0.0.1:{self._cluster.ports[router].grpc}"
            self._channels[router] = grpc.aio.insecure_channel(address, options=options)
        return GenerationServiceStub(self._channels[router])

    async def _ask(self, sent: Sent, router: str) -> pb.GenerateResponse | None:
        """Return the answer, or None if the client left before its end."""
        generation = pb.Generation()
        generation.CopyFrom(self._templates[sent.template].generation)
        generation.request_id = f"chaos-{sent.number}"
        if sent.salt:
            generation.cache_salt = sent.salt
        stub, deadline = self._stub(router), sent.deadline_seconds
        # A router that was restarted may not listen yet, as a balancer's health checks would know.
        if sent.manner == "whole" or (sent.manner == "hasty" and sent.number % 2):
            answer: pb.GenerateResponse = await stub.Generate(
                pb.GenerateRequest(generation=generation), timeout=deadline, wait_for_ready=True
            )
            return answer
        call = stub.GenerateStream(
            pb.GenerateStreamRequest(generation=generation), timeout=deadline, wait_for_ready=True
        )
        try:
            return await self._read(call, sent)
        finally:
            call.cancel()

    async def _read(self, call: Any, sent: Sent) -> pb.GenerateResponse | None:
        answer = pb.GenerateResponse()
        if sent.manner == "reads nothing":
            await asyncio.sleep(sent.pause_seconds)
            return None
        has_paused = sent.manner != "pauses"
        with suppress(TimeoutError):
            async with asyncio.timeout(sent.pause_seconds if sent.manner == "leaves" else None):
                async for message in call:
                    add_message(answer, message)
                    if message.usage.retries:
                        self.report.num_retried += 1
                    if not has_paused:
                        has_paused = True
                        await asyncio.sleep(sent.pause_seconds)
                return answer
        return None

    def _judge(self, answer: pb.GenerateResponse | None, sent: Sent) -> tuple[str, str]:
        if answer is None:
            return LEFT, ""
        problem = difference(answer, self._right[sent.template])
        return (RIGHT, "") if problem is None else (WRONG, problem)


def outcome_of_error(error: grpc.aio.AioRpcError, sent: Sent, *, router_has_gone: bool) -> tuple[str, str]:
    """Return the outcome of a request that ended with an error, and a description of the error."""
    reason = from_rpc_error(error).reason
    details = f"{error.code().name} {reason}: {error.details()}"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or reason == TOO_LATE:
        return (DEADLINE if sent.manner == "hasty" else LATE), details
    if reason == SUSPECTED:
        return SUSPECT, details
    if router_has_gone and error.code() is grpc.StatusCode.UNAVAILABLE:
        return ROUTER_GONE, details
    return LOST, details
