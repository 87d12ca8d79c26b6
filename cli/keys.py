"""``quire keys``: API keys."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.failure import usage_errors

app = typer.Typer(help="Make API keys.", no_args_is_help=True)
app.callback()(lambda: None)


@app.command()
def new(
    tenant: Annotated[str, typer.Argument(help="Whose key it is; tenants share no KV blocks.")],
    tokens_per_minute: Annotated[
        int | None,
        typer.Option("--tokens-per-minute", help="Tokens of prompts and answers per minute.", min=1),
    ] = None,
    max_requests: Annotated[
        int | None,
        typer.Option(
            "--max-requests", help="Requests that may run at once; one with n answers counts n times.", min=1
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", help="Requests that may wait for a running one to end.", min=0)
    ] = 0,
    weight: Annotated[
        int | None,
        typer.Option("--weight", help="Share of the computed tokens, relative to other tenants.", min=1),
    ] = None,
    priority: Annotated[
        int,
        typer.Option(
            "--priority", help="Lowest priority of a request is minus this; lower is sooner.", min=0, max=100
        ),
    ] = 0,
) -> None:
    """Make an API key. It is shown once, on stderr; its line for the --api-keys file goes to stdout.

    quire keys new acme >> api-keys
    """
    from quire.services.router.tenants.api_keys import Tenant, new_key

    with usage_errors():
        made = new_key(Tenant(tenant, tokens_per_minute, max_requests, max_waiting, weight, priority))
    typer.echo(f"API key of {tenant}, shown this once: {made.key}", err=True)
    typer.echo(made.line)
