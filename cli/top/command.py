"""``quire top``: shows the workers, requests and blocks of a running router."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.admin import AdminConnection, connected
from quire.cli.failure import fail
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.cli.top.app import TopApp

ONCE_SECONDS = 1.0
"""Time between the two snapshots from which ``--once`` has its rates."""


@spread
def top(
    *,
    once: Annotated[
        bool, typer.Option("--once", help="Print the numbers once, for scripts and pipes.")
    ] = False,
    connection: AdminConnection,
) -> None:
    """Show workers, blocks, requests, transfers and tenants of a running router, live.

    It reads the router's admin port and the metrics of all processes, and changes nothing.
    """
    screen = None if once else _live_screen()
    from quire.cli.top.snapshot import Change, take_snapshot

    with connected(connection) as client:
        take = partial(take_snapshot, client)
        first = take()
        if screen is not None:
            screen(connection.admin_address, take, first).run()
            return
        time.sleep(ONCE_SECONDS)
        second = take()
    from rich.console import Console

    from quire.cli.top.view import Screen

    Console().print(Screen(connection.admin_address, Change(second, first), Change(second, None)))


def _live_screen() -> type[TopApp]:
    if not _has_terminal():
        fail("the live screen needs a terminal: quire top --once prints the numbers once")
    try:
        from quire.cli.top.app import TopApp
    except ImportError as error:
        fail(
            "the live screen needs the extra 'top': in quire's clone, run "
            f".venv/bin/pip install -e '.[top]', or use quire top --once ({error})"
        )
    return TopApp


def _has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
