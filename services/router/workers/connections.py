"""Opens a router's connections to its workers, and closes them in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial

from quire.rpc.proof import Caller
from quire.rpc.tls import Connect
from quire.services.router.workers.worker import Worker, WorkerConnection


class Connections:
    """The connections to all workers.

    Args:
        connect: opens a channel.
        caller: signs the calls.
        on_open: called with a worker each time that its stream of outputs has been opened.
    """

    def __init__(self, connect: Connect, caller: Caller, on_open: Callable[[Worker], None]) -> None:
        self._connect = connect
        self._caller = caller
        self._on_open = on_open
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, address: str) -> WorkerConnection:
        """Return a connection to an address whose calls are not signed yet."""
        return WorkerConnection.to(address, self._connect)

    def prepare(self, worker: Worker) -> None:
        """Sign all later calls to a worker that has proved its identity, and open its stream of outputs."""
        worker.connection.sign_as(self._caller, worker.info, worker.health.proof_missing)
        worker.connection.outputs.keep_open(partial(self._on_open, worker))

    def replace(self, worker: Worker) -> None:
        """End the calls to a worker, so that their requests continue on other workers."""
        self.close_soon(worker.connection)
        worker.connection = self.open(worker.address)
        worker.health.reconnected()
        self.prepare(worker)

    async def reach(self, worker: Worker) -> None:
        """Return once a new connection to a worker has been made."""
        async with self.open(worker.address).channel as channel:
            await channel.channel_ready()

    def close_soon(self, connection: WorkerConnection) -> None:
        """Close a connection and end its calls."""
        task = asyncio.create_task(connection.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, connections: Iterable[WorkerConnection]) -> None:
        """Close these connections, and wait for those that are being closed."""
        await asyncio.gather(*(each.close() for each in connections), *self._closing)
