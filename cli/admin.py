"""``quire admin``: what an operator asks of a running router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quire.cli.failure import fail
from quire.cli.options import setting

if TYPE_CHECKING:
    from quire.client.admin import AdminClient, WorkerStatus

DEFAULT_ADDRESS = "127.0.0.1:8503"

app = typer.Typer(help="Operate a running router: its workers, their caches, the logs.", no_args_is_help=True)
Address = Annotated[str, setting("--admin-address", "host:port of the router's admin port.", "Connection")]
Cert = Annotated[
    Path | None, setting("--cluster-cert", "Certificate, if the port is not on the loopback.", "Connection")
]
Key = Annotated[Path | None, setting("--cluster-key", "Key of that certificate.", "Connection")]
Ca = Annotated[Path | None, setting("--cluster-ca", "Authority of the cluster's certificates.", "Connection")]


@app.callback()
def connection(
    context: typer.Context,
    address: Address = DEFAULT_ADDRESS,
    cert: Cert = None,
    key: Key = None,
    ca: Ca = None,
) -> None:
    """Operate a running router: its workers, their caches, the logs."""
    context.obj = (address, cert, key, ca)


@contextmanager
def _router(context: typer.Context) -> Iterator[AdminClient]:
    from quire.client import QuireError, Tls, Unavailable
    from quire.client.admin import AdminClient

    address, cert, key, ca = context.obj
    tls = Tls(ca=ca, certificate=cert, key=key) if ca else None
    try:
        with AdminClient(address, tls=tls) as client:
            yield client
    except Unavailable as error:
        if error.reason != error.code.name:
            fail(error.message)
        fail(f"no router's admin port answers at {address}: name it with --admin-address")
    except QuireError as error:
        fail(error.message)


@app.command()
def workers(context: typer.Context) -> None:
    """List the workers: state, requests that run and wait, blocks that are used, cached and free."""
    with _router(context) as router:
        found = router.workers()
    rows: list[tuple[str, ...]] = [
        ("WORKER", "ROLE", "ADDRESS", "STATE", "RUNNING", "WAITING", "USED", "CACHED", "FREE")
    ]
    rows += [_row(each) for each in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    state = "draining" if worker.is_draining else "serving"
    load = worker.load
    if load is None:
        return (worker.worker_id, worker.role, worker.address, "silent", *"-----")
    counts = (load.num_running, load.num_waiting, load.used_blocks, load.cached_blocks, load.free_blocks)
    return (worker.worker_id, worker.role, worker.address, state, *map(str, counts))


@app.command()
def drain(
    context: typer.Context,
    worker_id: Annotated[str, typer.Argument(help="Which worker.")],
    undo: Annotated[bool, typer.Option("--undo", help="Use it again.")] = False,
) -> None:
    """Send nothing new to a worker; what runs there goes on."""
    with _router(context) as router:
        router.drain(worker_id, undo=undo)
    typer.echo(f"{worker_id} {'serves again' if undo else 'drains'}")


@app.command("clear-cache")
def clear_cache(
    context: typer.Context,
    worker_ids: Annotated[list[str] | None, typer.Argument(help="Which workers; by default all.")] = None,
) -> None:
    """Forget cached KV blocks that no request uses: in the pool, in host memory and on disk."""
    with _router(context) as router:
        cleared = router.clear_caches(worker_ids or ())
    for worker_id, num_blocks in sorted(cleared.items()):
        typer.echo(f"{worker_id}: {num_blocks} blocks")


@app.command("log-level")
def log_level(
    context: typer.Context,
    level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Argument(help="Least severity of logged events.")
    ],
) -> None:
    """Log more or less, on the router and its workers."""
    with _router(context) as router:
        changed = router.change_log_level(level)
    typer.echo(f"the router and {', '.join(changed) or 'no worker'} log {level}")
