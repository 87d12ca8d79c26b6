"""Links between ranks that are threads of one process, and ranks that are processes."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch

from quire.engine.parallel.link import TOKEN_BYTES, Link, Purpose, Trust, accept, connect
from quire.engine.parallel.remote_rank import run_rank
from quire.engine.parallel.remote_ranks import RankLinks


def link_pair(purpose: Purpose = Purpose.STEPS) -> tuple[Link, Link]:
    """Return the end of rank 0 and that of another rank."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(connect, server.getsockname()[:2], purpose, bytes(TOKEN_BYTES), Trust(b""))
        _, _, link = accept(server.accept()[0], Trust(b""))
        return link, joining.result()


def be_rank(address: tuple[str, int], model: str | None) -> None:
    """Join rank 0 and run its steps, as a process; SIGTERM tells it to end."""
    leaving = Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: leaving.set())
    torch.set_num_threads(1)
    token = secrets.token_bytes(TOKEN_BYTES)
    links = RankLinks(*(connect(address, each, token, Trust(b"")) for each in Purpose))
    try:
        run_rank(links, model, leaving, lambda _: None)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
