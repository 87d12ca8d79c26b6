"""Starts and ends a launcher's workers until each role has the number that ``quire admin scale`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from itertools import count, islice
from typing import NamedTuple, Self

import grpc

from quire.protos import admin_pb2 as pb
from quire.protos import admin_pb2_grpc as pb_grpc
from quire.rpc.errors import cannot_listen
from quire.services.launch.launcher import Event, Launcher, LaunchError, Mailbox, NotStarted, Stopped
from quire.services.worker.config import WorkerConfig

LEAST = {"prefill": 0, "decode": 1}
"""Fewest workers of each role; decode workers generate the tokens, so there has to be one."""
MOST = 256
"""Most workers of a role, so that a typing error does not start millions."""
MAX_CALLS = 16
"""Most calls that wait at the same time; further calls are refused."""


class ScaleCall(NamedTuple):
    """A call of ``ScaleWorkers`` that waits for its response."""

    num_workers: Mapping[str, int]
    response: Future[pb.ScaleWorkersResponse]

    def answer(self, scale: Callable[[Mapping[str, int]], pb.ScaleWorkersResponse]) -> None:
        """Scale, and pass the response or the ``LaunchError`` on to the caller if it still waits."""
        with suppress(InvalidStateError):
            try:
                self.response.set_result(scale(self.num_workers))
            except (LaunchError, OSError, ValueError) as error:
                self.response.set_exception(LaunchError(str(error)))

    def end(self) -> None:
        """End the wait, because the caller has disconnected or the server stops."""
        self.response.cancel()


class ScaleServer(pb_grpc.AdminServiceServicer):
    """Serves ``ScaleWorkers`` to this stack's routers, on a loopback address, until the context ends.

    Routers are started with the address, so the server runs before the context begins; until then it refuses
    calls, since the stack is still starting.

    Attributes:
        address: host:port.
        calls: the calls to serve, read by the only thread that may use the launcher.

    Raises:
        OSError: no port can be bound.
    """

    def __init__(self) -> None:
        self.calls: Mailbox[ScaleCall] = Mailbox()
        self._is_open = False
        pool = ThreadPoolExecutor(MAX_CALLS, "scale")
        self._server = grpc.server(pool, maximum_concurrent_rpcs=MAX_CALLS)
        pb_grpc.add_AdminServiceServicer_to_server(self, self._server)
        try:
            self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        except RuntimeError as error:
            raise cannot_listen("127.0.0.1", 0, None) from error
        self._server.start()

    def ScaleWorkers(
        self, request: pb.ScaleWorkersRequest, context: grpc.ServicerContext
    ) -> pb.ScaleWorkersResponse:
        """Wait until the call has been answered, its caller has disconnected or this server stops."""
        if not self._is_open:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it is still starting: try again")
        call = ScaleCall(dict(request.num_workers), Future())
        if context.add_callback(call.end):
            self.calls.put(call)
            try:
                return call.response.result()
            except LaunchError as error:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except CancelledError:
                pass
        return pb.ScaleWorkersResponse()

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.stop(None).wait()


def scale(
    launcher: Launcher,
    make: Callable[[str], WorkerConfig],
    drain: Callable[[str], None],
    wait: Callable[[], Iterable[Event]],
    num_workers: Mapping[str, int],
) -> pb.ScaleWorkersResponse:
    """Start and end workers; return their names once the new ones serve and the others have ended.

    Args:
        make: returns the configuration of a new worker by its name, such as decode-2.
        drain: makes routers send no new requests to a worker, and move its answers elsewhere.
        wait: waits for the next events of the launcher.
        num_workers: requested number of workers by role; other roles do not change.

    Raises:
        LaunchError: a number is not possible, or a worker did not start and was stopped.
    """
    for role, number in num_workers.items():
        if role not in LEAST or not LEAST[role] <= number <= MOST:
            possible = " and ".join(f"{each} {fewest} to {MOST}" for each, fewest in LEAST.items())
            raise LaunchError(f"{role}={number} is not possible, only {possible}")
    response, problem = pb.ScaleWorkersResponse(), ""
    starting, stopping = set[str](), set[str]()

    def stop(name: str) -> None:
        drain(name)
        launcher.stop(name)
        stopping.add(name)

    new, surplus = list[str](), list[str]()
    for role, number in num_workers.items():
        present = [name for name in launcher.names if name.startswith(f"{role}-")]
        present.sort(key=lambda name: int(name.rpartition("-")[2]))
        surplus += reversed(present[number:])
        free = (name for index in count() if (name := f"{role}-{index}") not in launcher.names)
        new += islice(free, max(0, number - len(present)))
    configs = {name: make(name) for name in new}
    # New workers get the processors of those that end, of either role.
    for name in surplus:
        stop(name)
    launcher.start(configs)
    starting.update(configs)
    while starting or stopping:
        for event in wait():
            name = event.name
            if name in stopping and isinstance(event, Stopped):
                stopping.discard(name)
                response.left.append(name)
            elif name in starting:
                starting.discard(name)
                if isinstance(event, NotStarted):
                    problem = f"{name} did not start: {event.error}"
                    stop(name)
                else:
                    response.started.append(name)
    if problem:
        raise LaunchError(problem)
    return response
