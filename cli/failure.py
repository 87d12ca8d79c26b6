"""How a verb tells that it failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from quire.client import QuireError

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells have it."""


def fail(message: str) -> NoReturn:
    """Print the message to stderr and end with status 1."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn settings that a configuration refuses into a usage error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def start_errors() -> Iterator[None]:
    """Tell in one line why a process could not start: a port is taken, a model's folder is missing."""
    from quire.services.tracing import MissingTracingError

    try:
        yield
    except (OSError, MissingTracingError) as error:
        fail(str(error))


def describe(error: QuireError, address: str) -> str:
    """Return what went wrong and what to do about it."""
    from quire.client import DeadlineExceeded, Unavailable

    if isinstance(error, DeadlineExceeded):
        return f"{error.message} (--timeout gives it more time)"
    if isinstance(error, Unavailable) and not error.metadata and error.reason == error.code.name:
        if "handshake" in error.message.lower():
            return (
                f"no TLS with {address}: is --tls-ca the authority of its certificate, "
                "and the host, or --tls-name, its name? does it ask for --tls-client-cert?"
            )
        if any(end in error.message for end in ("Socket closed", "Connection reset")):
            return f"{address} hangs up: if its port is encrypted, name the authority with --tls-ca"
        return f"no server answers at {address}: start one with `quire serve`, or name another with --address"
    if error.retry_after is not None:
        return f"{error.message} (try again in {error.retry_after:g} s)"
    return error.message
