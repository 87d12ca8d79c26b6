"""The command ``quire`` and its verbs; each verb imports its modules only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli import admin, doctor, keys, processes
from quire.cli.bench.serve import serve as bench_serve
from quire.cli.chat import chat
from quire.cli.generate import generate
from quire.cli.health import health
from quire.cli.simulate import simulate
from quire.cli.top.command import top

SERVE, OPERATE, USE, MEASURE = "Serve", "Operate", "Use", "Measure"
SETTINGS = (
    "Settings come from the flag, then from the QUIRE_ variable shown next to it, then from the default."
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"quire {version('quire-llm')}")
        raise typer.Exit


def quire(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Serve large language models from paged KV blocks, with separate prefill and decode workers."""


def make_app() -> typer.Typer:
    """Return the command with all its verbs."""
    app = typer.Typer(
        name="quire",
        epilog=SETTINGS,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=SETTINGS)(quire)
    app.command(rich_help_panel=SERVE)(processes.serve)
    app.command(rich_help_panel=SERVE)(processes.router)
    app.command(rich_help_panel=SERVE)(processes.prefill)
    app.command(rich_help_panel=SERVE)(processes.decode)
    app.add_typer(doctor.app, name="doctor", rich_help_panel=OPERATE)
    app.add_typer(keys.app, name="keys", rich_help_panel=OPERATE)
    app.add_typer(admin.app, name="admin", rich_help_panel=OPERATE)
    app.command(rich_help_panel=OPERATE)(top)
    app.command(rich_help_panel=USE)(generate)
    app.command(rich_help_panel=USE)(chat)
    app.command(rich_help_panel=USE)(health)
    bench = typer.Typer(help="Measure a running router.", no_args_is_help=True)
    bench.command("serve")(bench_serve)
    bench.callback()(lambda: None)
    app.command(rich_help_panel=MEASURE)(simulate)
    app.add_typer(bench, name="bench", rich_help_panel=MEASURE)
    return app
