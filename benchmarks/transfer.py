"""Push throughput between two processes, beside what plain TCP does with the same bytes.

    python -m quire.benchmarks.transfer [--mebibytes 256] [--repeats 3]

Sender and receiver are processes of their own on the loopback. A push digests every block, copies it into
protobuf messages, checks it at the receiver and copies it into the receiver's memory; the ceiling is
``sendall`` and ``recv_into`` of 2 MiB buffers, which do none of that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import grpc.aio
from prometheus_client import CollectorRegistry

from quire.kvtransfer.channels import ChannelPool
from quire.kvtransfer.frame import MESSAGE_BYTES, Frame
from quire.kvtransfer.layout import KvLayout
from quire.kvtransfer.malloc import keep_freed_buffers
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push import BlockPush, PushSummary
from quire.kvtransfer.receiver import KvTransferServicer
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc

GIB = 1 << 30
MIB = 1 << 20
HOST = "127.0.0.1"
EPOCH = "benchmark"
NUM_LAYERS = (1, 8, 32, 80)
"""Layers of 64 KiB (8 KV heads, float16); the last two make the blocks of an 8B and of a 70B model."""
START_SECONDS = 30.0


def layout(num_layers: int) -> KvLayout:
    return KvLayout(num_layers, 8, 16, 128, "float16", "benchmark")


class MemorySink:
    """A receiver that copies blocks into memory, over and over the same window of it."""

    epoch = EPOCH

    def __init__(self, kv_layout: KvLayout) -> None:
        self.layout = kv_layout
        self._memory = memoryview(bytearray(max(64 * MIB, kv_layout.block_bytes)))
        self._num_slots = len(self._memory) // kv_layout.block_bytes

    async def open(self, request: pb.PushOpen) -> MemorySink:
        return self

    def write(self, frame: Frame) -> None:
        start = frame.index % self._num_slots * self.layout.block_bytes
        self._memory[start : start + self.layout.block_bytes] = frame.payload

    async def commit(self, first_token_id: int | None) -> None:
        pass

    def abort(self, reason: str) -> None:
        raise RuntimeError(reason)


class Receiver(NamedTuple):
    """Where the receiving process listens: one gRPC port for each layout, and one for plain TCP."""

    grpc_ports: dict[int, int]
    tcp_port: int


def receive(ready: Connection) -> None:
    """Be the receiving process, until the other end of ``ready`` is closed."""
    keep_freed_buffers()
    asyncio.run(_receive(ready))


async def _receive(ready: Connection) -> None:
    servers, ports = [], {}
    for num_layers in NUM_LAYERS:
        options = [("grpc.max_receive_message_length", 256 * MIB)]
        server = grpc.aio.server(options=options)
        servicer = KvTransferServicer(MemorySink(layout(num_layers)), TransferMetrics(CollectorRegistry()))
        kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
        ports[num_layers] = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        servers.append(server)
    with socket.create_server((HOST, 0)) as listener:
        drain = asyncio.create_task(asyncio.to_thread(_drain, listener))
        ready.send(Receiver(ports, listener.getsockname()[1]))
        await asyncio.to_thread(ready.poll, None)
        await drain
    for server in servers:
        await server.stop(None)


def _drain(listener: socket.socket) -> None:
    """Take one connection: swallow each round of bytes, whose length comes first, and acknowledge it."""
    buffer = bytearray(MESSAGE_BYTES)
    connection, _ = listener.accept()
    with connection:
        while header := connection.recv(8, socket.MSG_WAITALL):
            num_left = int.from_bytes(header, "little")
            while num_left:
                num_left -= connection.recv_into(buffer, min(num_left, len(buffer)))
            connection.sendall(b"\0")


@contextmanager
def receiver_process() -> Iterator[Receiver]:
    """Start the receiving process and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_SECONDS):
            raise TimeoutError("the receiving process did not start")
        yield ours.recv()
    finally:
        ours.close()
        process.join(START_SECONDS)
        process.kill()


def measure_tcp(port: int, num_bytes: int, repeats: int) -> float:
    """Return the best GiB/s of plain TCP."""
    payload = bytes(MESSAGE_BYTES)
    rates = []
    with socket.create_connection((HOST, port)) as connection:
        for _ in range(repeats):
            start = time.perf_counter()
            num_messages = num_bytes // MESSAGE_BYTES
            connection.sendall((num_messages * MESSAGE_BYTES).to_bytes(8, "little"))
            for _ in range(num_messages):
                connection.sendall(payload)
            connection.recv(1)
            rates.append(num_messages * MESSAGE_BYTES / GIB / (time.perf_counter() - start))
    return max(rates)


async def measure_push(address: str, kv_layout: KvLayout, num_bytes: int, repeats: int) -> PushSummary:
    """Return the fastest of some pushes."""
    channels = ChannelPool()
    payload = bytes(kv_layout.block_bytes)
    num_blocks = num_bytes // kv_layout.block_bytes
    ticket = pb.Ticket(ticket_id="benchmark", address=address, receiver_epoch=EPOCH)
    summaries = []
    for attempt in range(repeats):
        async with BlockPush(
            channels.get(address),
            ticket,
            request_id="benchmark",
            attempt=attempt,
            layout=kv_layout,
            num_blocks=num_blocks,
            timeout=60.0,
        ) as push:
            await push.send(Frame(i, i.to_bytes(16, "little"), payload) for i in range(num_blocks))
            summaries.append(await push.commit(0))
    await channels.close()
    return min(summaries, key=lambda summary: summary.seconds)


def main() -> None:
    """Print a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description="Push throughput on the loopback, beside plain TCP.")
    parser.add_argument("--mebibytes", type=int, default=256, help="size of one push")
    parser.add_argument("--repeats", type=int, default=3, help="pushes of each size; the fastest counts")
    arguments = parser.parse_args()
    num_bytes = arguments.mebibytes * MIB
    keep_freed_buffers()
    rows = []
    with receiver_process() as receiver:
        tcp = measure_tcp(receiver.tcp_port, num_bytes, arguments.repeats)
        print(f"{'block':>10}  {'push GiB/s':>10}  {'of TCP':>6}  {'no credit':>9}  {'sending':>7}")
        for num_layers, port in receiver.grpc_ports.items():
            kv_layout = layout(num_layers)
            summary = asyncio.run(
                measure_push(f"{HOST}:{port}", kv_layout, num_bytes, arguments.repeats),
            )
            rate = summary.num_bytes / GIB / summary.seconds
            waiting, sending = (
                part / summary.seconds for part in (summary.credit_wait_seconds, summary.send_seconds)
            )
            print(
                f"{kv_layout.block_bytes // 1024:>6} KiB  {rate:>10.2f}  {rate / tcp:>6.0%}"
                f"  {waiting:>9.0%}  {sending:>7.0%}"
            )
            rows.append({"block_bytes": kv_layout.block_bytes, "push_gib_per_second": round(rate, 3)})
    print(f"{'plain TCP':>10}  {tcp:>10.2f}")
    print(json.dumps({"benchmark": "transfer", "tcp_gib_per_second": round(tcp, 3), "pushes": rows}))


if __name__ == "__main__":
    main()
