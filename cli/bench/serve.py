"""``quire bench serve``: puts load on a running router and measures what its clients experience."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli import options
from quire.cli.bench.config import BenchConfig
from quire.cli.failure import describe, fail, writable
from quire.cli.results import print_table
from quire.cli.spread import spread


@spread
def serve(
    *,
    config: BenchConfig,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the line of JSON to this file too.", callback=writable, dir_okay=False
        ),
    ] = None,
    address: options.Address = options.DEFAULT_ADDRESS,
    api_key: options.ApiKey = None,
    encryption: options.ClientTls,
    timeout: options.Timeout = 300.0,
) -> None:
    """Put load on a running router; print a table of what its clients measured, then one line of JSON."""
    import asyncio
    from functools import partial

    from quire.cli.bench.report import to_json, to_table
    from quire.cli.bench.run import run_bench
    from quire.client import AsyncClient, QuireError

    try:
        tls = encryption.files()
        connect = partial(AsyncClient, address.split(","), timeout=timeout, api_key=api_key, tls=tls)
        summary = asyncio.run(run_bench(config, connect))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except QuireError as error:
        fail(describe(error, address))
    print_table(to_table(summary))
    line = to_json(summary, config)
    if json_file is not None:
        json_file.write_text(line + "\n", encoding="utf-8")
    typer.echo(line)
    if not summary.num_succeeded:
        failures = ", ".join(f"{status} {count} times" for status, count in summary.failures.items())
        fail(f"no request succeeded: {failures}")
