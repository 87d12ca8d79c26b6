"""``quire admin``: commands with which an operator inspects and changes a running router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quire.cli.failure import connection_problem, fail
from quire.cli.options import CONNECTION, option
from quire.cli.spread import spread
from quire.services.router.config import DEFAULT_ADMIN_PORT

if TYPE_CHECKING:
    from quire.client.admin import AdminClient, WorkerStatus

app = typer.Typer(help="Operate a running router: its workers, their caches, the logs.", no_args_is_help=True)


@dataclass(frozen=True)
class AdminConnection:
    """How the router's admin port is reached."""

    admin_address: Annotated[
        str, option("--admin-address", "host:port of the router's admin port.", CONNECTION)
    ] = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"


@contextmanager
def connected(connection: AdminConnection) -> Iterator[AdminClient]:
    """Yield a client of the router's admin port; end the command with a message if a call fails."""
    from quire.client import QuireError, Unavailable, Unsupported
    from quire.client.admin import AdminClient

    address = connection.admin_address
    try:
        with AdminClient(address) as client:
            yield client
    except Unavailable as error:
        if error.reason != error.code.name:
            fail(error.message)
        if connection_problem(error.message, address) is None:
            fail(f"no router's admin port answers at {address}: name it with --admin-address")
        fail(f"{address} is not a router's admin port: name that with --admin-address")
    except Unsupported as error:
        if error.reason != error.code.name:
            fail(error.message)
        fail(f"{address} is another port than a router's admin port: name that one with --admin-address")
    except QuireError as error:
        fail(error.message)


@app.command()
@spread
def workers(*, connection: AdminConnection) -> None:
    """List the workers with their state, running and waiting requests, and used, cached and free blocks."""
    with connected(connection) as router:
        found, elastic_roles = router.workers(), router.elastic_roles()
    rows: list[tuple[str, ...]] = [
        ("WORKER", "ROLE", "ADDRESS", "REVISION", "STATE", "RUNNING", "WAITING", "USED", "CACHED", "FREE")
    ]
    rows += [_row(each) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())
    if elastic_roles:
        typer.echo(f"elastic roles: {elastic_roles}")


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    load, names = worker.load, (worker.worker_id, worker.role, worker.address, worker.revision, worker.state)
    if load is None:
        return (*names, *"-----")
    counts = (load.num_running, load.num_waiting, load.used_blocks, load.cached_blocks, load.free_blocks)
    return (*names, *map(str, counts))


@app.command()
@spread
def drain(
    *,
    worker_id: Annotated[str, typer.Argument(help="Which worker.")],
    undo: Annotated[bool, typer.Option("--undo", help="Use it again.")] = False,
    connection: AdminConnection,
) -> None:
    """Send no new requests to a worker, and move its answers to others. Other routers follow."""
    with connected(connection) as router:
        router.drain(worker_id, undo=undo)
    typer.echo(f"{worker_id} {'serves again' if undo else 'drains'}")


@app.command()
@spread
def scale(
    *,
    numbers: Annotated[
        list[str],
        typer.Argument(help="Number of workers of a role, such as decode=3.", metavar="ROLE=NUMBER..."),
    ],
    connection: AdminConnection,
) -> None:
    """Start or end workers of `quire serve`; those that end pass their running requests on."""
    requested = dict(map(_role_and_number, numbers))
    with connected(connection) as router:
        scaled = router.scale(requested)
    for name in scaled.started:
        typer.echo(f"{name} has started")
    for name in scaled.left:
        typer.echo(f"{name} has left")
    if not (scaled.started or scaled.left):
        typer.echo("nothing to change")


def _role_and_number(text: str) -> tuple[str, int]:
    role, _, number = text.partition("=")
    if role not in ("prefill", "decode") or not number.isdecimal():
        raise typer.BadParameter(f"{text!r} is not a role and a number: write decode=3 or prefill=2")
    return role, int(number)


@app.command()
@spread
def role(
    *,
    worker_id: Annotated[str, typer.Argument(help="Which worker.")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="Its new role.")],
    connection: AdminConnection,
) -> None:
    """Change the role of a worker, which keeps its cache and its running requests."""
    with connected(connection) as router:
        router.change_role(worker_id, role)
    typer.echo(f"{worker_id} is a {role} worker now")


@app.command("clear-cache")
@spread
def clear_cache(
    *,
    worker_ids: Annotated[list[str] | None, typer.Argument(help="Which workers; by default all.")] = None,
    connection: AdminConnection,
) -> None:
    """Forget cached KV blocks that no request uses: in the pool, in host memory and on disk."""
    with connected(connection) as router:
        cleared = router.clear_caches(worker_ids or ())
    for worker_id, num_blocks in sorted(cleared.items()):
        typer.echo(f"{worker_id}: {num_blocks} blocks")


@app.command("add-adapter")
@spread
def add_adapter(
    *,
    name: Annotated[str, typer.Argument(help="Name that requests give as their model.")],
    path: Annotated[str, typer.Argument(help="Its folder on the workers' machines, or hub id.")],
    connection: AdminConnection,
) -> None:
    """Load an adapter (LoRA) on every worker; running requests keep the weights that they began with."""
    with connected(connection) as router:
        digest = router.add_adapter(name, path)
    typer.echo(f"{name} is served, with the digest {digest}")


@app.command("remove-adapter")
@spread
def remove_adapter(
    *, name: Annotated[str, typer.Argument(help="Its name.")], connection: AdminConnection
) -> None:
    """Unload an adapter on every worker; requests that use it continue with it."""
    with connected(connection) as router:
        router.remove_adapter(name)
    typer.echo(f"{name} is served no more")


@app.command("log-level")
@spread
def log_level(
    *,
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Argument(help="Least severe level that is logged."),
    ],
    connection: AdminConnection,
) -> None:
    """Change the log level of the router and its workers."""
    with connected(connection) as router:
        changed = router.change_log_level(level)
    typer.echo(f"the router and {', '.join(changed) or 'no worker'} log {level}")
