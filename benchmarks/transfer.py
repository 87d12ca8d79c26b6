"""Measures push throughput between two processes: in messages, out of a shared pool, and with NIXL.

    python -m quire.benchmarks.transfer --mebibytes 256 --repeats 5

Sender and receiver are separate processes on one host. The sender's blocks are in a pool; every way brings
them into the receiver's memory and checks the digest of each. In messages, a block is digested, copied into
protobuf messages, checked at the receiver and copied into its memory. Out of the shared pool, the receiver
copies a block once and checks the copy; the sender digests it for each push ("shared"), or only when it is
first sent ("shared, digests kept"). With NIXL, if it is installed, the receiver READs blocks into a slab,
copies them and checks the copies; the sender digests them for each push. UCX chooses the network among those
that the environment allows (``UCX_TLS``, ``UCX_NET_DEVICES``).

The ceilings check nothing: ``sendall`` and ``recv_into`` of 2 MiB buffers over TCP, and a copy of the pool in
one thread. All ways take turns; medians count. CPU seconds are those of both processes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple, get_args

import grpc.aio
import numpy as np
from prometheus_client import CollectorRegistry

from quire.benchmarks.harness.options import AtLeast
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import cpu_seconds
from quire.benchmarks.harness.tables import table
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.frame import MESSAGE_BYTES, Frame, Transport, digest
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push_receiver import KvTransferServicer
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks, PushSummary
from quire.kvtransfer.transports.interface import Transports
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.kvtransfer.transports.nixl import NixlPools
from quire.kvtransfer.transports.shared import SharedPools
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool
from quire.services.server.process import keep_freed_buffers

GIB = 1 << 30
MIB = 1 << 20
HOST = "127.0.0.1"
EPOCH = "benchmark"
START_SECONDS = 120.0

Way = Literal["messages", "shared", "shared, digests kept", "NIXL"]
WAYS: tuple[Way, ...] = tuple(way for way in get_args(Way) if way != "NIXL" or find_spec("nixl_cu12"))
SHARED: tuple[Way, ...] = ("shared", "shared, digests kept")
CEILINGS = ("TCP", "memcpy")


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    mebibytes: Annotated[int, AtLeast(2), "size of one push"] = 256
    repeats: Annotated[int, AtLeast(1), "rounds; medians count"] = 5
    layers: Annotated[tuple[int, ...], "layers of a block, of 64 KiB; 32 and 80 as in 8B and 70B models"] = (
        *(1, 8, 32, 80),
    )

    def __post_init__(self) -> None:
        if self.mebibytes * MIB < layout(max(self.layers)).block_bytes:
            raise ValueError(f"--mebibytes is less than a block of {max(self.layers)} layers")


def layout(num_layers: int) -> KvLayout:
    return KvLayout(num_layers, 8, 16, 128, "float16", "benchmark", "float16", "float32-2")


class MemorySink:
    """A receiver that repeatedly copies blocks into the same window of memory."""

    epoch = EPOCH
    first_block = 0
    num_held_blocks = 0

    def __init__(self, kv_layout: KvLayout) -> None:
        self.layout = kv_layout
        num_slots = max(64 * MIB // kv_layout.block_bytes, 1)
        self._slots = np.ones((num_slots, kv_layout.block_bytes), np.uint8)

    async def open(self, request: pb.PushOpen) -> MemorySink:
        return self

    def write(self, frame: Frame) -> None:
        slot = self._slots[frame.index % len(self._slots)]
        slot[:] = np.frombuffer(frame.payload, np.uint8)
        frame.check_copy(slot.data)

    async def commit(self, first_token_id: int | None) -> None:
        pass

    def abort(self, reason: str) -> None:
        raise RuntimeError(reason)


def expected_transport(way: Way) -> Transport:
    if way == "NIXL":
        return Transport.NIXL
    return Transport.SHARED if way in SHARED else Transport.MESSAGES


class Receiver(NamedTuple):
    """The receiving process, and where it listens: a gRPC port for each layout and way, and a plain one."""

    process_id: int
    grpc_ports: dict[tuple[int, Way], int]
    tcp_port: int


def receive(ready: Connection, folder: Path, layers: tuple[int, ...]) -> None:
    """Run the receiving process until the other end of ``ready`` is closed."""
    keep_freed_buffers()
    asyncio.run(_receive(ready, folder, layers))


async def _receive(ready: Connection, folder: Path, layers: tuple[int, ...]) -> None:
    servers = []
    ports: dict[tuple[int, Way], int] = {}
    opened: list[Transports] = [shared := SharedPools(folder)]
    for num_layers in layers:
        transports: dict[Transport, Transports] = {
            Transport.MESSAGES: MESSAGES_ONLY,
            Transport.SHARED: shared,
        }
        if "NIXL" in WAYS:
            # Its blocks have one size.
            transports[Transport.NIXL] = NixlPools(f"receiver-{num_layers}")
            opened.append(transports[Transport.NIXL])
        for way in WAYS:
            server = grpc.aio.server(options=[("grpc.max_receive_message_length", 256 * MIB)])
            sink = MemorySink(layout(num_layers))
            metrics = TransferMetrics(CollectorRegistry())
            servicer = KvTransferServicer(sink, metrics, transports[expected_transport(way)])
            kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
            ports[num_layers, way] = server.add_insecure_port(f"{HOST}:0")
            await server.start()
            servers.append(server)
    with socket.create_server((HOST, 0)) as tcp:
        drain = asyncio.create_task(asyncio.to_thread(_drain, tcp))
        ready.send(Receiver(os.getpid(), ports, tcp.getsockname()[1]))
        await asyncio.to_thread(ready.poll, None)
        await drain
    for server in servers:
        await server.stop(None)
    for each in opened:
        each.close()


def _drain(listener: socket.socket) -> None:
    """Accept one connection; read each round of bytes, which begins with its length, and acknowledge it."""
    buffer = bytearray(MESSAGE_BYTES)
    connection, _ = listener.accept()
    with connection:
        while header := connection.recv(8, socket.MSG_WAITALL):
            num_left = int.from_bytes(header, "little")
            while num_left:
                num_left -= connection.recv_into(buffer, min(num_left, len(buffer)))
            connection.sendall(b"\0")


@contextmanager
def receiver_process(folder: Path, layers: tuple[int, ...]) -> Iterator[Receiver]:
    """Start the receiving process and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, folder, layers), daemon=True)
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


class SenderPool:
    """The sender's blocks: memory that the receiver may map, and the digests of its blocks by their size."""

    def __init__(self, num_bytes: int) -> None:
        # It loads torch, which the receiving process does not need.
        from quire.engine.kv_cache.shared_memory import allocate_shared

        memory = allocate_shared(num_bytes)
        self.descriptor = memory.descriptor
        self.bytes = memory.bytes.numpy()
        self.bytes[:] = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        self._digests: dict[int, list[int]] = {}

    def frames(self, block_bytes: int, *, keeps_digests: bool) -> Iterator[Frame]:
        """Yield the frames of all blocks, with their digests if these are kept."""
        rows = self.bytes[: len(self.bytes) // block_bytes * block_bytes].reshape(-1, block_bytes)
        kept: list[int] = self._digests.setdefault(block_bytes, [])
        for index, row in enumerate(rows):
            block_hash = index.to_bytes(16, "little")
            if len(kept) == index:
                kept.append(digest(block_hash, row.data))
            yield Frame(index, block_hash, row.data, kept[index] if keeps_digests else None, index)


def send_plainly(connection: socket.socket, pool: SenderPool) -> float:
    """Return the GiB/s of a plain stream of the pool's bytes."""
    num_bytes = len(pool.bytes) // MESSAGE_BYTES * MESSAGE_BYTES
    start = time.perf_counter()
    connection.sendall(num_bytes.to_bytes(8, "little"))
    for offset in range(0, num_bytes, MESSAGE_BYTES):
        connection.sendall(pool.bytes[offset : offset + MESSAGE_BYTES].data)
    connection.recv(1)
    return num_bytes / GIB / (time.perf_counter() - start)


def copy_in_memory(pool: SenderPool, target: np.ndarray[Any, Any]) -> float:
    """Return the GiB/s of a copy in one thread."""
    start = time.perf_counter()
    np.copyto(target, pool.bytes)
    return len(pool.bytes) / GIB / (time.perf_counter() - start)


def both_cpu_seconds(process_id: int) -> float:
    """Return the CPU seconds of this process and another."""
    return time.process_time() + cpu_seconds(process_id)


async def push(
    channels: ChannelPool,
    address: str,
    kv_layout: KvLayout,
    pool: SenderPool,
    way: Way,
    transports: Transports,
) -> PushSummary:
    """Push the whole pool."""
    num_blocks = len(pool.bytes) // kv_layout.block_bytes
    ticket = pb.Ticket(ticket_id="benchmark", address=address, receiver_epoch=EPOCH)
    async with BlockPush(
        channels,
        ticket,
        attempt=0,
        blocks=PromptBlocks(kv_layout, num_blocks),
        timeout=60.0,
        transports=transports,
    ) as opened:
        await opened.send(pool.frames(kv_layout.block_bytes, keeps_digests=way == SHARED[1]))
        summary = await opened.commit(0)
    if summary.transport != expected_transport(way):
        raise RuntimeError(f"the blocks of {way} came as {summary.transport}")
    return summary


class Rates(NamedTuple):
    """GiB/s of each round, and the CPU seconds and GiB of all rounds."""

    ceilings: dict[str, list[float]]
    push: dict[tuple[int, Way], list[float]]
    cpu_seconds: dict[tuple[int, Way], float]
    gib: dict[tuple[int, Way], float]


async def measure(receiver: Receiver, folder: Path, num_bytes: int, repeats: int) -> Rates:
    """Return the rates of all ways, in turns; the first round opens connections and does not count."""
    pool = SenderPool(num_bytes)
    target = np.ones_like(pool.bytes)
    keys = list(receiver.grpc_ports)
    rates = Rates({name: [] for name in CEILINGS}, {key: [] for key in keys}, dict.fromkeys(keys, 0.0), {})
    channels = ChannelPool(grpc.aio.insecure_channel)
    shared = SharedPools(folder)
    shared.share("sender", pool.descriptor)
    transports: dict[Transport, Transports] = {Transport.MESSAGES: MESSAGES_ONLY, Transport.SHARED: shared}
    if "NIXL" in WAYS:
        by_nixl = NixlPools("sender")
        by_nixl.share(pool.bytes.ctypes.data, pool.bytes.nbytes)
        transports[Transport.NIXL] = by_nixl
    with socket.create_connection((HOST, receiver.tcp_port)) as tcp:
        for number in range(repeats + 1):
            rates.ceilings["TCP"].append(await asyncio.to_thread(send_plainly, tcp, pool))
            rates.ceilings["memcpy"].append(await asyncio.to_thread(copy_in_memory, pool, target))
            for key, port in receiver.grpc_ports.items():
                num_layers, way = key
                address = f"{HOST}:{port}"
                before = both_cpu_seconds(receiver.process_id)
                chosen = transports[expected_transport(way)]
                summary = await push(channels, address, layout(num_layers), pool, way, chosen)
                rates.push[key].append(summary.num_bytes / GIB / summary.seconds)
                if number:
                    rates.cpu_seconds[key] += both_cpu_seconds(receiver.process_id) - before
                    rates.gib[key] = rates.gib.get(key, 0.0) + summary.num_bytes / GIB
    await channels.close()
    for opened in transports.values():
        opened.close()
    return rates


def rows_of(rates: Rates) -> list[dict[str, Any]]:
    """Return a row for each size of blocks: GiB/s and CPU seconds per GiB by the way of the blocks."""
    rows = []
    for num_layers in dict.fromkeys(num_layers for num_layers, _ in rates.push):
        speeds = {way: median(rates.push[num_layers, way][1:]) for way in WAYS}
        costs = {way: rates.cpu_seconds[num_layers, way] / rates.gib[num_layers, way] for way in WAYS}
        rows.append(
            {
                "block_kib": layout(num_layers).block_bytes // 1024,
                "push_gib_per_second": {way: round(speed, 3) for way, speed in speeds.items()},
                "cpu_seconds_per_gib": {way: round(cost, 3) for way, cost in costs.items()},
            }
        )
    return rows


@program
def main(options: Options) -> Report:
    """Push in all ways, and measure the ceilings."""
    keep_freed_buffers()
    with TemporaryDirectory() as name:
        folder = Path(name)
        with receiver_process(folder, options.layers) as receiver:
            rates = asyncio.run(measure(receiver, folder, options.mebibytes * MIB, options.repeats))
    rows = rows_of(rates)
    ceilings = {name: round(median(values[1:]), 3) for name, values in rates.ceilings.items()}
    ways: dict[str, str] = {
        way: f"{{push_gib_per_second[{way}]:.2f}} ({{cpu_seconds_per_gib[{way}]:.2f}} s)" for way in WAYS
    }
    title = "GiB/s, and CPU seconds per GiB"
    line = "ceilings: " + ", ".join(f"{name} {rate:.2f}" for name, rate in ceilings.items())
    pushes = table(title, rows, {"block": "{block_kib} KiB", **ways})
    return Report([pushes, line], {"ceilings_gib_per_second": ceilings, "rows": rows})


if __name__ == "__main__":
    main()
