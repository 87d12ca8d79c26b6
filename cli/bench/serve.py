"""``quire bench serve``: puts load on a running router and measures what its clients experience."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli import options
from quire.cli.bench.config import BenchConfig
from quire.cli.failure import describe, fail, writable
from quire.cli.results import print_table
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.client import AsyncClient


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
        for each, connect in zip(addresses, connects, strict=True):
            asyncio.run(_check(each, connect))
        summaries = asyncio.run(run_bench(config, connects))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except QuireError as error:
        fail(describe(error, ",".join(addresses)))
    for each, summary in zip(addresses, summaries, strict=True):
        print_table(to_table(summary, each))
    line = to_json(summaries[0], config, *summaries[1:])
    typer.echo(line)
    if json_file is not None:
        json_file.write_text(line + "\n", encoding="utf-8")
    for summary in summaries:
        if not summary.num_succeeded:
            failures = ", ".join(f"{status} {count} times" for status, count in summary.failures.items())
            fail(f"no request succeeded: {failures}")


async def _check(address: str, connect: Callable[[], AsyncClient]) -> None:
    """End the command with an error that names the router, if it does not answer."""
    from quire.client import QuireError

    async with connect() as client:
        try:
            await client.model_info()
        except QuireError as error:
            fail(describe(error, address))
