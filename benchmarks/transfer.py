"""Push throughput between two processes, in clear and encrypted, beside plain TCP with the same bytes.

    python -m quire.benchmarks.transfer [--mebibytes 256] [--repeats 5] [--json PATH]

Sender and receiver are processes of their own on the loopback. A push digests every block, copies it into
protobuf messages, checks it at the receiver and copies it into the receiver's memory; the ceiling is
``sendall`` and ``recv_into`` of 2 MiB buffers, which do none of that. With TLS the receiver shows a
certificate, with mutual TLS, as between workers, both do. All ways take turns; medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.channels import ChannelPool
from quire.kvtransfer.frame import MESSAGE_BYTES, Frame
from quire.kvtransfer.freed_buffers import keep_freed_buffers
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.push_receiver import KvTransferServicer
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.services.server.tls import CLUSTER_NAME, ClusterTls, Connect, TlsFiles, server_credentials

GIB = 1 << 30
MIB = 1 << 20
HOST = "127.0.0.1"
EPOCH = "benchmark"
NUM_LAYERS = (1, 8, 32, 80)
"""Layers of 64 KiB (8 KV heads, float16); the last two make the blocks of an 8B and of a 70B model."""
START_SECONDS = 30.0

Way = Literal["clear", "TLS", "mutual TLS"]
WAYS: tuple[Way, ...] = get_args(Way)


def layout(num_layers: int) -> KvLayout:
    return KvLayout(num_layers, 8, 16, 128, "float16", "benchmark", "float16", "cpu")


class MemorySink:
    """A receiver that copies all blocks into the same window of memory, repeatedly."""

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


def write_certificate(folder: Path) -> TlsFiles:
    """Write a certificate of the cluster that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CLUSTER_NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CLUSTER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = TlsFiles(folder / "node.pem", folder / "node.key", folder / "node.pem")
    files.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def credentials(way: Way, files: TlsFiles) -> grpc.ServerCredentials | None:
    """Return the credentials of the receiving end of a connection."""
    if way == "clear":
        return None
    return server_credentials(files if way == "mutual TLS" else replace(files, authority=None))


def connect(way: Way, files: TlsFiles) -> Connect:
    """Return the function that opens the sending end of a connection."""
    if way == "clear":
        return grpc.aio.insecure_channel
    if way == "mutual TLS":
        return ClusterTls(files).connect
    trusted = grpc.ssl_channel_credentials(files.certificate.read_bytes())

    def open_channel(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        name = ("grpc.ssl_target_name_override", CLUSTER_NAME)
        return grpc.aio.secure_channel(address, trusted, options=[*options, name])

    return open_channel


class Receiver(NamedTuple):
    """Where the receiving process listens: a gRPC port for each layout and way, and one for plain TCP."""

    grpc_ports: dict[tuple[int, Way], int]
    tcp_port: int


def receive(ready: Connection, files: TlsFiles) -> None:
    """Run the receiving process until the other end of ``ready`` is closed."""
    keep_freed_buffers()
    asyncio.run(_receive(ready, files))


async def _receive(ready: Connection, files: TlsFiles) -> None:
    servers = []
    ports: dict[tuple[int, Way], int] = {}
    for num_layers in NUM_LAYERS:
        for way in WAYS:
            server = grpc.aio.server(options=[("grpc.max_receive_message_length", 256 * MIB)])
            sink = MemorySink(layout(num_layers))
            servicer = KvTransferServicer(sink, TransferMetrics(CollectorRegistry()))
            kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server)
            shown = credentials(way, files)
            ports[num_layers, way] = (
                server.add_insecure_port(f"{HOST}:0")
                if shown is None
                else server.add_secure_port(f"{HOST}:0", shown)
            )
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
def receiver_process(files: TlsFiles) -> Iterator[Receiver]:
    """Start the receiving process and end it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, files), daemon=True)
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


def send_over_tcp(connection: socket.socket, num_bytes: int) -> float:
    """Return the GiB/s of plain TCP."""
    payload = bytes(MESSAGE_BYTES)
    num_messages = num_bytes // MESSAGE_BYTES
    start = time.perf_counter()
    connection.sendall((num_messages * MESSAGE_BYTES).to_bytes(8, "little"))
    for _ in range(num_messages):
        connection.sendall(payload)
    connection.recv(1)
    return num_messages * MESSAGE_BYTES / GIB / (time.perf_counter() - start)


async def push(
    channels: ChannelPool, address: str, kv_layout: KvLayout, num_bytes: int, attempt: int
) -> float:
    """Return the GiB/s of one push."""
    payload = bytes(kv_layout.block_bytes)
    num_blocks = num_bytes // kv_layout.block_bytes
    ticket = pb.Ticket(ticket_id="benchmark", address=address, receiver_epoch=EPOCH)
    async with BlockPush(
        channels,
        ticket,
        sequence_id="benchmark",
        attempt=attempt,
        blocks=PromptBlocks(kv_layout, num_blocks),
        timeout=60.0,
    ) as opened:
        await opened.send(Frame(i, i.to_bytes(16, "little"), payload) for i in range(num_blocks))
        summary = await opened.commit(0)
    return summary.num_bytes / GIB / summary.seconds


async def measure(receiver: Receiver, files: TlsFiles, num_bytes: int, repeats: int) -> Rates:
    """Return the rates of all ways, in turns; the first round opens connections and does not count."""
    rates = Rates([], {key: [] for key in receiver.grpc_ports})
    pools = {way: ChannelPool(connect(way, files)) for way in WAYS}
    with socket.create_connection((HOST, receiver.tcp_port)) as connection:
        for attempt in range(repeats + 1):
            tcp = await asyncio.to_thread(send_over_tcp, connection, num_bytes)
            pushed = {
                (num_layers, way): await push(
                    pools[way], f"{HOST}:{port}", layout(num_layers), num_bytes, attempt
                )
                for (num_layers, way), port in receiver.grpc_ports.items()
            }
            if attempt:
                rates.tcp.append(tcp)
                for key, rate in pushed.items():
                    rates.push[key].append(rate)
    for pool in pools.values():
        await pool.close()
    return rates


class Rates(NamedTuple):
    """GiB/s of each round."""

    tcp: list[float]
    push: dict[tuple[int, Way], list[float]]


def main() -> None:
    """Print a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description="Push throughput on the loopback, beside plain TCP.")
    parser.add_argument("--mebibytes", type=int, default=256, help="size of one push")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; medians count")
    parser.add_argument("--json", type=Path, help="write the line of JSON to this file too")
    arguments = parser.parse_args()
    keep_freed_buffers()
    with TemporaryDirectory() as folder:
        files = write_certificate(Path(folder))
        with receiver_process(files) as receiver:
            rates = asyncio.run(measure(receiver, files, arguments.mebibytes * MIB, arguments.repeats))
    tcp = median(rates.tcp)
    print("GiB/s".rjust(10) + "".join(way.rjust(20) for way in WAYS))
    rows = []
    for num_layers in NUM_LAYERS:
        medians = {way: median(rates.push[num_layers, way]) for way in WAYS}
        cells = [f"{rate:.2f} ({rate / tcp:.0%} of TCP)".rjust(20) for rate in medians.values()]
        block_bytes = layout(num_layers).block_bytes
        print(f"{block_bytes // 1024} KiB".rjust(10) + "".join(cells))
        rounded = {way: round(rate, 3) for way, rate in medians.items()}
        rows.append({"block_bytes": block_bytes, "push_gib_per_second": rounded})
    print("TCP".rjust(10) + f"{tcp:.2f}".rjust(20))
    result = {
        "benchmark": "transfer",
        "mebibytes": arguments.mebibytes,
        "repeats": arguments.repeats,
        "tcp_gib_per_second": round(tcp, 3),
        "pushes": rows,
    }
    line = json.dumps(result)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
