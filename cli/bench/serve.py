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
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="Second router, which takes turns with the first.", metavar="ADDRESS"),
    ] = None,
    connection: options.RouterConnection,
    encryption: options.ClientTls,
) -> None:
    """Put load on a router, or on two in turns; print what its clients measured, then one line of JSON."""
    import asyncio
    from dataclasses import replace
    from functools import partial

    from quire.cli.bench.report import to_json, to_table
    from quire.cli.bench.run import run_bench
    from quire.client import AsyncClient, QuireError

    addresses = [connection.address] if compare is None else [connection.address, compare]
    try:
        tls = encryption.files()
        connects = [partial(replace(connection, address=each).client, AsyncClient, tls) for each in addresses]
        summaries = asyncio.run(run_bench(config, connects))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except QuireError as error:
        fail(describe(error, ",".join(addresses)))
    for each, summary in zip(addresses, summaries, strict=True):
        print_table(to_table(summary, each))
    line = to_json(summaries[0], config, *summaries[1:])
    if json_file is not None:
        json_file.write_text(line + "\n", encoding="utf-8")
    typer.echo(line)
    for summary in summaries:
        if not summary.num_succeeded:
            failures = ", ".join(f"{status} {count} times" for status, count in summary.failures.items())
            fail(f"no request succeeded: {failures}")
