"""``quire doctor``: says whether a command that serves can run on this machine, without starting it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire.cli.processes import DECODE, PREFILL, ROUTER, STACK, STACK_ROUTER, STACK_WORKER, stack_config
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.services.doctor.machine import Finding

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}

app = typer.Typer(help="Say whether a command can serve on this machine; by default `quire serve`.")


@app.callback(invoke_without_command=True)
def doctor(context: typer.Context) -> None:
    """Say whether a command can serve here with its settings; by default `quire serve`."""
    if context.invoked_subcommand is None:
        command = typer.main.get_group(app).commands["serve"]
        with command.make_context("serve", [], parent=context) as served:
            command.invoke(served)


@app.command()
@spread
def serve(*, worker: STACK_WORKER, stack: STACK, router: STACK_ROUTER) -> None:
    """Check this machine for `quire serve` with the same settings; the exit status is 1 on a problem."""
    from quire.services.doctor.commands import check_stack

    _show(check_stack(stack_config(worker, stack, router)))


@app.command()
@spread
def router(*, config: ROUTER) -> None:
    """Check this machine for `quire router` with the same settings; the exit status is 1 on a problem."""
    from quire.services.doctor.commands import check_router

    _show(check_router(config))


@app.command()
@spread
def prefill(*, config: PREFILL) -> None:
    """Check this machine for `quire prefill` with the same settings; the exit status is 1 on a problem."""
    from quire.services.doctor.commands import check_worker

    _show(check_worker(config))


@app.command()
@spread
def decode(*, config: DECODE) -> None:
    """Check this machine for `quire decode` with the same settings; the exit status is 1 on a problem."""
    from quire.services.doctor.commands import check_worker

    _show(check_worker(config))


def _show(findings: Iterable[Finding]) -> None:
    """Print a table of the findings; end with status 1 if one is a problem."""
    table, has_problem = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0)), False
    for header in ("", "What", "Found", "Remedy"):
        table.add_column(header, overflow="fold")
    for each in findings:
        has_problem |= each.level == "problem"
        level = f"[{COLOURS[each.level]}]{each.level}[/]"
        table.add_row(level, each.subject, escape(each.text), escape(each.remedy))
    Console().print(table)
    if has_problem:
        raise typer.Exit(1)
