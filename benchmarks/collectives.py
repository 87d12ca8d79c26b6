"""How long ranks take to add their partial sums: in shared memory, over connections, and by gloo.

    python -m quire.benchmarks.collectives
    python -m quire.benchmarks.collectives --ranks 4 --width 4096

Each rank is a process with one thread. All three ways add the same tensors in turns, and the ranks meet
before each sum. gloo's all_reduce is the peer: it adds in an order of its own, so its bits depend on the
number of ranks. The ceiling is a byte there and back over a TCP connection of this machine. The table has
medians in microseconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from quire.engine.parallel.collectives import Collectives, SharedMemory, SharedSizes, pieces
from quire.engine.parallel.link import TOKEN_BYTES, Purpose, Trust, accept, connect
from quire.engine.parallel.link_collectives import LinkCollectives
from quire.engine.parallel.shares import Shares

ROWS = (1, 8, 32, 512)
WARM_UP, NUM_SUMS = 20, 200
_FORK = multiprocessing.get_context("fork")
Sum = Callable[[torch.Tensor], object]


def main() -> None:
    """Measure each number of rows, print the table, and then the line."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.collectives", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="values of a row")
    options = parser.parse_args()
    report = _measure(options.ranks, options.width)
    ceiling = _round_trip()
    table = Table("rows", *next(iter(report.values())), "ceiling: a byte there and back")
    for rows, found in report.items():
        table.add_row(str(rows), *(f"{value:.0f} µs" for value in found.values()), f"{ceiling:.0f} µs")
    Console().print(table)
    line = {"benchmark": "collectives", "ranks": options.ranks, "width": options.width}
    print(json.dumps(line | {"round_trip": ceiling, "microseconds": report}))


def _measure(num_ranks: int, width: int) -> dict[int, dict[str, float]]:
    memory = SharedMemory(SharedSizes(num_ranks, max(ROWS), width, width, 4096))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as free:
        gloo = free.getsockname()[1]
        free.close()
        queue = _FORK.Queue()
        processes = [
            _FORK.Process(target=_be_rank, args=(rank, num_ranks, memory, server, gloo, queue))
            for rank in range(num_ranks)
        ]
        for each in processes:
            each.start()
        report: dict[int, dict[str, float]] = queue.get(timeout=300)
        for each in processes:
            each.join()
    return report


def _be_rank(
    rank: int, num_ranks: int, memory: SharedMemory, server: socket.socket, gloo: int, queue: Any
) -> None:
    torch.set_num_threads(1)
    borders = np.array(Shares(8).borders(num_ranks))
    num_pieces = len(pieces(borders, rank))
    shared = Collectives(memory, rank)
    linked = LinkCollectives(SharedMemory(memory.sizes), _links(rank, num_ranks, server), rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gloo), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    ways: dict[str, Sum] = {
        "shared memory": lambda partial: shared.sum([partial] * num_pieces, borders),
        "connections": lambda partial: linked.sum([partial] * num_pieces, borders),
        "gloo": lambda partial: dist.all_reduce(partial.clone()),
    }
    width = memory.sizes.sum_width
    report: dict[int, dict[str, list[float]]] = {rows: {name: [] for name in ways} for rows in ROWS}
    for number in range(WARM_UP + NUM_SUMS):
        for rows in ROWS:
            partial = torch.ones((rows, width))
            for name, add in ways.items():
                shared.meet()
                began_at = time.perf_counter()
                add(partial)
                if number >= WARM_UP:
                    report[rows][name].append(1e6 * (time.perf_counter() - began_at))
    dist.destroy_process_group()
    if rank == 0:
        medians = {
            rows: {name: round(median(each), 1) for name, each in found.items()}
            for rows, found in report.items()
        }
        queue.put(medians)


def _links(rank: int, num_ranks: int, server: socket.socket) -> list[Any]:
    if rank:
        address, token = server.getsockname()[:2], secrets.token_bytes(TOKEN_BYTES)
        return [connect(address, Purpose.STEPS, bytes([rank]) + token[1:], Trust())]
    by_token = {}
    for _ in range(1, num_ranks):
        _, token, link = accept(server.accept()[0], Trust())
        link.set_limit(None)
        by_token[token] = link
    return [by_token[token] for token in sorted(by_token)]


def _round_trip() -> float:
    """Return the median microseconds of a byte there and back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname()[:2])
        theirs, _ = server.accept()
    for each in (ours, theirs):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def echo() -> None:
        ours.close()
        while data := theirs.recv(1):
            theirs.sendall(data)

    process = _FORK.Process(target=echo)
    process.start()
    theirs.close()
    times = []
    for _ in range(1000):
        began_at = time.perf_counter()
        ours.sendall(b"x")
        ours.recv(1)
        times.append(time.perf_counter() - began_at)
    ours.close()
    process.join()
    return round(1e6 * median(times), 1)


if __name__ == "__main__":
    main()
