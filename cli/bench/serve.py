"""``quire bench serve``: puts load on a running router and measures what its clients experience."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli import options
from quire.cli.bench.config import BenchConfig, Dataset
from quire.cli.failure import describe, fail, writable
from quire.cli.spread import spread
from quire.cli.tables import print_table


def _load(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Load", **more)


def _prompts(flag: str, help: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel="Prompts", **more)


@spread
def serve(
    *,
    rate: Annotated[
        float | None, _load("--rate", "Open loop: this many requests a second, Poisson arrivals.", min=0.001)
    ] = None,
    concurrency: Annotated[
        int, _load("--concurrency", "Closed loop: this many requests under way; unused with --rate.", min=1)
    ] = BenchConfig.concurrency,
    num_requests: Annotated[
        int, _load("--num-requests", "Requests to measure.", min=1)
    ] = BenchConfig.num_requests,
    num_warmups: Annotated[
        int, _load("--num-warmups", "Requests to send before, unmeasured.", min=0)
    ] = BenchConfig.num_warmups,
    dataset: Annotated[
        Dataset, _prompts("--dataset", "Random token ids, or the bundled demo's questions about notes.")
    ] = BenchConfig.dataset,
    input_len: Annotated[
        int, _prompts("--input-len", "Tokens of a prompt; of notes, about.", min=1)
    ] = BenchConfig.input_len,
    shared_prefix_len: Annotated[
        int, _prompts("--shared-prefix-len", "How many of them all random prompts begin with.", min=0)
    ] = BenchConfig.shared_prefix_len,
    output_len: Annotated[
        int, _prompts("--output-len", "Most tokens to generate.", min=1)
    ] = BenchConfig.output_len,
    ignore_eos: Annotated[
        bool, _prompts("--ignore-eos", "Always generate that many, whatever the model says.")
    ] = BenchConfig.ignore_eos,
    temperature: Annotated[float, _prompts("--temperature", "0 is greedy.")] = BenchConfig.temperature,
    seed: Annotated[int, _prompts("--seed", "Same seed, same prompts and arrivals.")] = BenchConfig.seed,
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
        config = BenchConfig(
            rate=rate,
            concurrency=concurrency,
            num_requests=num_requests,
            num_warmups=num_warmups,
            dataset=dataset,
            input_len=input_len,
            shared_prefix_len=shared_prefix_len,
            output_len=output_len,
            ignore_eos=ignore_eos,
            temperature=temperature,
            seed=seed,
        )
        tls = encryption.files()
        connect = partial(AsyncClient, address, timeout=timeout, api_key=api_key, tls=tls)
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
