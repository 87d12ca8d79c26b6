"""Runs the fuzz: starts the stack, sends the requests, watches the processes, and checks what is left."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import grpc.aio
import psutil
from rich.console import Console

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from tests.soak.fuzz.answers import answer_problem
from tests.soak.fuzz.http_bodies import http_call
from tests.soak.fuzz.proxy import behind_nginx
from tests.soak.fuzz.requests import random_generation

NUM_BLOCKS = 1024
DEADLINE_SECONDS = 60.0
LEAVING_SHARE = 0.1
"""Share of clients that leave within a second."""
LONG_TOKENS = 500
"""An answer that may have more tokens may miss its deadline on a busy machine."""
NUM_REPEATED = 100
"""Requests that are sent again at the end."""
QUIET_SECONDS = 30.0
WARM_UP_SHARE = 0.3
"""Share of the time after which memory is compared with the end's."""
MEMORY_GROWTH = 1.3
FLOOD_MIB = 100.0
"""Memory that a flood may cost a process."""
MAX_DEFECTS = 20
"""Number of defects after which no further request begins."""
CANARY = pb.Generation(
    text="the code of the lantern is 417. what is the code of the lantern?",
    sampling=pb.SamplingParams(temperature=0.0),
    stopping=pb.StoppingParams(max_tokens=24, ignore_eos=True),
)
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


@dataclass
class FuzzReport:
    """What a fuzz found.

    Attributes:
        outcomes: number of requests by door ("grpc" or "http") and by outcome.
        memory_mib: of each process, after the warm-up and at the end.
        peak_mib: maximum of each process while requests were sent.
        gaps: seconds between messages of the streams over gRPC.
        num_different: requests that gave other tokens when they were sent again.
    """

    seed: int
    seconds: float = 0.0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    memory_mib: dict[str, tuple[float, float]] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    num_repeated: int = 0
    num_different: int = 0
    defects: list[str] = field(default_factory=list)


async def fuzz(
    seed: int,
    seconds: float,
    concurrency: int,
    num_requests: int,
    *,
    is_quiet: bool,
    num_hostile: int = 0,
    has_nginx: bool = False,
) -> FuzzReport:
    """Send random requests to a stack of one prefill and two decode workers.

    Args:
        seed: seed of the requests; which requests run concurrently still depends on time.
        seconds: time after which no request begins.
        concurrency: number of requests in flight.
        num_requests: number of requests after which no request begins.
        is_quiet: whether to print nothing.
        num_hostile: number of hostile connections beside the requests, which flood both ports all the time.
        has_nginx: whether all clients go through nginx, with the configuration in ``deploy/nginx``.
    """
    config = LocalStackConfig(
        num_prefill=1,
        num_decode=2,
        router=RouterConfig(port=0, http_port=0),
        worker=WorkerConfig(role="decode", dtype="float32", num_blocks=NUM_BLOCKS),
        log_level="error",
    )
    console = Console(stderr=True, quiet=is_quiet)
    with ExitStack() as around:
        stack = around.enter_context(local_stack(config, console))
        assert stack.http_address is not None
        addresses = (stack.address, stack.http_address)
        if has_nginx:
            addresses = around.enter_context(behind_nginx(*addresses))
        async with _connected(stack, *addresses) as run:
            run.report.seed = seed
            with _flooded(addresses, num_hostile, seconds) if num_hostile else nullcontext():
                await run.send_all(seed, seconds, concurrency, num_requests, console)
            await run.finish(Random(seed), FLOOD_MIB if num_hostile else 0.0)
            return run.report


@asynccontextmanager
async def _connected(stack: RunningStack, grpc_address: str, http_address: str) -> AsyncIterator[_Run]:
    async with grpc.aio.insecure_channel(grpc_address) as channel, aiohttp.ClientSession() as session:
        yield _Run(stack, GenerationServiceStub(channel), session, http_address)


@contextmanager
def _flooded(addresses: tuple[str, str], num_connections: int, seconds: float) -> Iterator[None]:
    """Flood two ports from another process until the context ends."""
    options = ["--connections", str(num_connections), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "tests.soak.fuzz.hostile", *addresses, *options]
    flooding = subprocess.Popen(command)
    try:
        yield
    finally:
        flooding.kill()
        flooding.wait()


class _Run:
    """One fuzz of a running stack."""

    def __init__(
        self,
        stack: RunningStack,
        stub: GenerationServiceStub,
        session: aiohttp.ClientSession,
        http_address: str,
    ) -> None:
        self._stack = stack
        self._http_address = http_address
        self._stub = stub
        self._session = session
        self._processes = {
            name: psutil.Process(child.process.pid)
            for name, child in {**stack.routers, **stack.workers}.items()
        }
        self._answered: list[tuple[pb.Generation, list[list[int]]]] = []
        self.report = FuzzReport(0)

    async def send_all(
        self, seed: int, seconds: float, concurrency: int, num_requests: int, console: Console
    ) -> None:
        """Send requests until the time is over."""
        begin = time.monotonic()
        canary = await self._canary()
        numbers = iter(range(num_requests))
        next_note = begin + 10

        async def client() -> None:
            nonlocal next_note
            for number in numbers:
                elapsed = time.monotonic() - begin
                if elapsed > seconds or len(self.report.defects) >= MAX_DEFECTS:
                    return
                if not self.report.memory_mib and elapsed > WARM_UP_SHARE * seconds:
                    self.report.memory_mib = {name: (size, 0.0) for name, size in self._sizes().items()}
                if time.monotonic() > next_note:
                    next_note += 10
                    for name, size in self._sizes().items():
                        self.report.peak_mib[name] = max(size, self.report.peak_mib.get(name, 0.0))
                    console.print(f"{elapsed:4.0f} s: {sum(self.report.outcomes.values())} requests")
                # Each request has a generator of its own: a number names the same request in every run.
                random = Random(f"{seed}-{number}")
                await self._send(number, random)
                if number % 50 == 49 and await self._canary() != canary:
                    self.report.defects.append(f"request {number}: the canary's answer changed")

        await asyncio.gather(*(client() for _ in range(concurrency)))
        self.report.seconds = time.monotonic() - begin

    async def finish(self, random: Random, spare_mib: float) -> None:
        """Check that processes, blocks and memory are as they were, and that answers repeat.

        Args:
            spare_mib: what a process may grow by in addition.
        """
        report = self.report
        for name, process in self._processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                report.defects.append(f"{name} has ended")
                return
        await self._repeat(random.sample(self._answered, min(NUM_REPEATED, len(self._answered))))
        await self._check_blocks()
        for name, size in self._sizes().items():
            before = report.memory_mib.get(name, (size, 0.0))[0]
            report.memory_mib[name] = (before, size)
            if size > before * MEMORY_GROWTH + spare_mib:
                report.defects.append(f"{name} grew from {before:.0f} to {size:.0f} MiB")

    # --- one request --------------------------------------------------------------------------------------

    async def _send(self, number: int, random: Random) -> None:
        generation = random_generation(random)
        is_http = random.random() < 0.5
        leaves_after = random.random() if random.random() < LEAVING_SHARE else None
        door, send = ("http", self._over_http) if is_http else ("grpc", self._over_grpc)
        try:
            async with asyncio.timeout(leaves_after):
                outcome, defect = await send(generation, random)
        except TimeoutError:
            outcome, defect = "client left", None
            if leaves_after is None and not _is_long(generation):
                outcome = "no answer"
                defect = f"no answer within {DEADLINE_SECONDS:.0f} s"
        self.report.outcomes[door, outcome] += 1
        if defect is not None:
            self.report.defects.append(f"request {number} over {door}: {defect}")

    async def _over_grpc(self, generation: pb.Generation, random: Random) -> tuple[str, str | None]:
        try:
            response = await self._generate(generation, is_streamed=random.random() < 0.5)
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            outcome = f"{error.code().name} {known.reason}"
            is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and _is_long(generation)
            is_refusal = error.code() in _REFUSALS or is_late
            return outcome, None if is_refusal else f"{outcome}: {error.details()}"
        if _repeats(generation):
            self._answered.append((generation, _tokens(response)))
        return "answered", answer_problem(generation, response)

    async def _generate(self, generation: pb.Generation, *, is_streamed: bool) -> pb.GenerateResponse:
        if not is_streamed:
            request = pb.GenerateRequest(generation=generation)
            response: pb.GenerateResponse = await self._stub.Generate(request, timeout=DEADLINE_SECONDS)
            return response
        choices: dict[int, pb.Choice] = {}
        whole = pb.GenerateResponse()
        call = self._stub.GenerateStream(
            pb.GenerateStreamRequest(generation=generation), timeout=DEADLINE_SECONDS
        )
        last = None
        async for message in call:
            now = time.monotonic()
            if last is not None:
                self.report.gaps.append(now - last)
            last = now
            choice = choices.setdefault(message.index, pb.Choice(index=message.index))
            choice.text += message.text
            choice.token_ids.extend(message.token_ids)
            choice.logprobs.extend(message.logprobs)
            choice.finish_reason = message.finish_reason or choice.finish_reason
            choice.pieces.extend(message.pieces)
            whole.usage.MergeFrom(message.usage)
        whole.choices.extend(choices[index] for index in sorted(choices))
        return whole

    async def _over_http(self, generation: pb.Generation, random: Random) -> tuple[str, str | None]:
        path, body = http_call(generation, random)
        url = f"http://{self._http_address}{path}"
        timeout = aiohttp.ClientTimeout(DEADLINE_SECONDS)
        headers = {"content-type": "application/json"}
        async with self._session.post(
            url, data=io.BytesIO(json.dumps(body).encode()), headers=headers, timeout=timeout
        ) as response:
            text = await response.text()
            if response.status == 504 and _is_long(generation):
                return "504 timeout_error", None
            if response.status != 200:
                return _http_error(response.status, text)
            if body["stream"] is not True:
                return "answered", _whole_problem(text)
            return _stream_outcome(text)

    # --- the state of the stack ---------------------------------------------------------------------------

    async def _canary(self) -> list[list[int]]:
        return _tokens(await self._generate(CANARY, is_streamed=False))

    async def _repeat(self, sample: list[tuple[pb.Generation, list[list[int]]]]) -> None:
        for generation, expected in sample:
            self.report.num_repeated += 1
            tokens = _tokens(await self._generate(generation, is_streamed=False))
            if tokens != expected:
                self.report.num_different += 1
                self.report.defects.append(f"other tokens when sent again: {generation}".replace("\n", " "))

    async def _check_blocks(self) -> None:
        for name, worker in self._stack.ready.items():
            async with grpc.aio.insecure_channel(worker.address) as channel:
                stub = WorkerServiceStub(self._stack.peer(name, channel))
                deadline = time.monotonic() + QUIET_SECONDS
                while True:
                    load = await stub.GetLoad(worker_pb2.GetLoadRequest())
                    if not (load.used_blocks or load.pinned_blocks or load.num_running or load.num_waiting):
                        break
                    if time.monotonic() > deadline:
                        self.report.defects.append(f"{name} still holds blocks: {load}".replace("\n", " "))
                        return
                    await asyncio.sleep(0.1)

    def _sizes(self) -> dict[str, float]:
        """Return each process' memory in MiB, without files that are only mapped."""
        return {
            name: (process.memory_info().rss - process.memory_info().shared) / (1 << 20)
            for name, process in self._processes.items()
        }


def _tokens(response: pb.GenerateResponse) -> list[list[int]]:
    return [list(choice.token_ids) for choice in response.choices]


def _is_long(generation: pb.Generation) -> bool:
    """Return whether an answer may take longer than its deadline: up to all of the model's length."""
    stopping = generation.stopping
    return not stopping.HasField("max_tokens") or stopping.max_tokens > LONG_TOKENS


def _repeats(generation: pb.Generation) -> bool:
    """Return whether a request gives the same tokens each time."""
    sampling = generation.sampling
    is_determined = sampling.HasField("seed") or sampling.HasField("beam")
    return is_determined and not sampling.HasField("kv_budget_tokens")


def _http_error(status: int, text: str) -> tuple[str, str | None]:
    try:
        error = json.loads(text)["error"]
        kind, message = str(error.get("type")), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"{status}", f"{status} without an error object: {text[:200]}"
    is_refusal = 400 <= status < 500
    return f"{status} {kind}", None if is_refusal and message else f"{status} {kind}: {message}"


def _whole_problem(text: str) -> str | None:
    answer: dict[str, Any] = json.loads(text)
    if not answer["choices"]:
        return "no choices"
    reasons = {choice["finish_reason"] for choice in answer["choices"]}
    return None if reasons <= {"stop", "length", "tool_calls"} else f"finish reasons {reasons}"


def _stream_outcome(text: str) -> tuple[str, str | None]:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events:
        return "answered", "an empty stream"
    *events, last = events
    reasons: set[str] = set()
    for event in [*events, last]:
        if event == "[DONE]":
            continue
        content = json.loads(event)
        if "error" in content:
            is_refusal = content["error"]["type"] == "invalid_request_error"
            return _http_error(400 if is_refusal else 500, event)
        reasons |= {choice["finish_reason"] for choice in content["choices"] if choice["finish_reason"]}
    if last != "[DONE]":
        return "answered", f"a stream without an end: {last[:200]}"
    return "answered", None if reasons else "a stream without a finish reason"
