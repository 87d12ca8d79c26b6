"""Measures the CPU time that a streamed token takes between the engine and the client.

    python -m quire.benchmarks.token_path --clients 1,16,64 --tokens 200 --rounds 3

A local stack with one worker serves the demo model; each client streams one answer, over gRPC or over HTTP. A
divided answer consists of reasoning, content and tool calls, as chats over HTTP need it.
``router`` is the CPU time of the router's processes, ``worker`` that of the worker's event loop, which is its
main thread. ``messages`` is the number of messages that a client gets for each token: below 1, tokens of
several steps share a message. It changes with the load of the machine, and most of the router's time is spent
on messages, so compare APIs by the router's time per message. ``bare`` is the CPU time per message of a gRPC
server that only streams the same messages, one for each token. The values are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Annotated, Any, NamedTuple

import aiohttp
import grpc.aio
from rich.console import Console
from rich.progress import track

from quire.benchmarks.harness.options import AtLeast
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import cpu_seconds, main_thread_cpu_seconds, medians, turns
from quire.benchmarks.harness.tables import table
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.channels import NO_PROXY
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig

PROMPT = [5, 6, 7, 8]
CHAT = [{"role": "user", "content": "the code of the lantern is 417."}]
BARE_MESSAGES = 300
CONNECTIONS_PER_PROCESS = 8

Stream = Callable[[int], Awaitable[int]]
"""Streams an answer of a number of tokens, and returns the number of messages."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    clients: Annotated[tuple[int, ...], "numbers of clients"] = (1, 16, 64)
    tokens: Annotated[int, "tokens of an answer"] = 200
    rounds: Annotated[int, AtLeast(1), "rounds that count"] = 3
    router_processes: int = 1


class Cost(NamedTuple):
    """The times of one round."""

    tokens_per_second: float
    messages_per_token: float
    router_microseconds: float
    worker_microseconds: float
    router_microseconds_per_message: float


async def measure(stack: RunningStack, stream: Stream, num_clients: int, num_tokens: int) -> Cost:
    """Let clients stream one answer each, and return the times."""
    worker_id = _id_of(next(iter(stack.workers.values())).process)

    def read() -> tuple[float, float]:
        routers = sum(cpu_seconds(_id_of(child.process)) for child in stack.routers.values())
        return routers, main_thread_cpu_seconds(worker_id)

    before, start = read(), time.perf_counter()
    num_messages = sum(await asyncio.gather(*(stream(num_tokens) for _ in range(num_clients))))
    seconds, total = time.perf_counter() - start, num_clients * num_tokens
    after = read()
    router, worker = (1e6 * (end - begin) for begin, end in zip(before, after, strict=True))
    return Cost(total / seconds, num_messages / total, router / total, worker / total, router / num_messages)


def over_grpc(channels: Sequence[grpc.aio.Channel], *, parse: bool = False) -> Stream:
    """Return a function that streams an answer over gRPC, on each connection in turn.

    Args:
        parse: divide the answer into reasoning, content and tool calls.
    """
    stubs = cycle([pb_grpc.GenerationServiceStub(channel) for channel in channels])

    async def stream(num_tokens: int) -> int:
        generation = pb.Generation(
            token_ids=pb.TokenIds(ids=PROMPT),
            stopping=pb.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
            response=pb.ResponseOptions(parse=parse),
        )
        request = pb.GenerateStreamRequest(generation=generation)
        return len([message async for message in next(stubs).GenerateStream(request)])

    return stream


def over_http(session: aiohttp.ClientSession, url: str, **prompt: Any) -> Stream:
    """Return a function that streams an answer over HTTP, to a prompt that the body of the request has."""

    async def stream(num_tokens: int) -> int:
        body = {**prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        async with session.post(url, json=body) as response:
            response.raise_for_status()
            return (await response.read()).count(b"data: {")

    return stream


async def bare_microseconds(num_streams: int) -> float:
    """Return the CPU time per message of a gRPC server, in a separate process, that only sends messages."""
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve_bare, args=(there,), daemon=True)
    process.start()
    try:
        port = await asyncio.to_thread(here.recv)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[NO_PROXY]) as channel:
            call = channel.unary_stream("/bare/Stream", _unchanged, _unchanged)

            async def read() -> int:
                return len([message async for message in call(b"")])

            before = cpu_seconds(_id_of(process))
            num_messages = sum(await asyncio.gather(*(read() for _ in range(num_streams))))
            return 1e6 * (cpu_seconds(_id_of(process)) - before) / num_messages
    finally:
        process.terminate()
        process.join()


def _id_of(process: BaseProcess) -> int:
    assert process.pid is not None, "it has started"
    return process.pid


def _unchanged(message: bytes) -> bytes:
    return message


def _serve_bare(pipe: Connection) -> None:
    message = pb.GenerateStreamResponse(text=" token", token_ids=[1234]).SerializeToString()

    async def send(request: bytes, context: Any) -> None:
        for _ in range(BARE_MESSAGES):
            await context.write(message)

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {"Stream": grpc.unary_stream_rpc_method_handler(send)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    asyncio.run(serve())


@asynccontextmanager
async def streams(stack: RunningStack) -> AsyncIterator[dict[str, Stream]]:
    """Yield the functions that stream over each API, by its name."""
    async with AsyncExitStack() as opened:
        # Each connection belongs to one router process, so several processes need several connections.
        number = 1 if len(stack.routers) == 1 else CONNECTIONS_PER_PROCESS * len(stack.routers)
        options = [NO_PROXY, ("grpc.use_local_subchannel_pool", 1)]
        made = [grpc.aio.insecure_channel(stack.address, options=options) for _ in range(number)]
        channels = [await opened.enter_async_context(channel) for channel in made]
        connector = aiohttp.TCPConnector(limit=0)
        session = await opened.enter_async_context(aiohttp.ClientSession(connector=connector))
        http = f"http://{stack.http_address}/v1"
        yield {
            "gRPC": over_grpc(channels),
            "gRPC, divided": over_grpc(channels, parse=True),
            "HTTP, completion": over_http(session, f"{http}/completions", prompt=PROMPT),
            "HTTP, chat": over_http(session, f"{http}/chat/completions", messages=CHAT),
        }


async def run(options: Options) -> list[dict[str, Any]]:
    """Start the stack and return a row for each API and number of clients."""
    rows = []
    router = RouterConfig(port=0, http_port=0, num_processes=options.router_processes)
    config = LocalStackConfig(num_prefill=0, num_decode=1, router=router)
    with local_stack(config) as stack:
        for number in options.clients:
            bare = await bare_microseconds(number)
            costs: dict[str, list[Cost]] = defaultdict(list)
            async with streams(stack) as apis:
                title, console = f"{number} clients", Console(stderr=True)
                for index, name in track([*turns(apis, options.rounds)], title, console=console):
                    cost = await measure(stack, apis[name], number, options.tokens)
                    if index >= 0:
                        costs[name].append(cost)
            for name in apis:
                floor, figures = bare if name == "gRPC" else None, medians(costs[name])._asdict()
                rows.append({"api": name, "clients": number, **figures, "bare_microseconds": floor})
    return rows


@program
def main(options: Options) -> Report:
    """Measure each API."""
    rows = asyncio.run(run(options))
    columns = {
        "API": "{api}",
        "clients": "{clients}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "messages": "{messages_per_token:.2f}",
        "router µs/token": "{router_microseconds:.0f}",
        "router µs/message": "{router_microseconds_per_message:.0f}",
        "worker µs/token": "{worker_microseconds:.0f}",
        "bare µs (floor)": "{bare_microseconds:.0f}",
    }
    return Report([table("CPU time of a streamed token", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
