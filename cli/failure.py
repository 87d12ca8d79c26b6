"""Errors of commands: messages, exit statuses and their causes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from quire.settings.setting import is_address

if TYPE_CHECKING:
    from quire.client import QuireError

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as in shells."""


def fail(message: str) -> NoReturn:
    """Print the message to stderr and end with status 1."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the ValueError of a configuration that refuses its settings into a usage error."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def start_errors() -> Iterator[None]:
    """Report in one line why a process could not start, such as a taken port or a missing model folder."""
    from quire.services.server.tracing import MissingTracingError
    from quire.settings.setting import SettingError

    try:
        yield
    except (OSError, MissingTracingError, SettingError) as error:
        fail(str(error))


def writable(path: Path | None) -> Path | None:
    """Return the file of an option after checking that it can be written, before the work begins.

    Raises:
        BadParameter: the file cannot be written.
    """
    if path is not None:
        try:
            is_new = not path.exists()
            if not (is_new or path.is_file()):
                return path  # a pipe would end for its reader
            path.open("ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from error
    return path


def describe(error: QuireError, address: str) -> str:
    """Return a message that says what went wrong and what to do about it.

    Args:
        address: that of the server, or several separated by commas.
    """
    from quire.client import DeadlineExceeded, Unavailable, Unsupported

    if isinstance(error, DeadlineExceeded):
        return f"{error.message} (--timeout gives it more time)"
    # A status that gRPC itself made has neither metadata nor one of quire's reasons.
    is_own = not error.metadata and error.reason == error.code.name
    if isinstance(error, Unavailable) and is_own:
        return connection_problem(error.message, address) or (
            f"no server answers at {address}: start one with `quire serve`, or name another with --address"
        )
    if isinstance(error, Unsupported) and is_own:
        return f"{address} speaks gRPC but has no such call: is it the port of a worker, or of `quire admin`?"
    if error.retry_after is not None:
        return f"{error.message} (try again in {error.retry_after:g} s)"
    return error.message


def connection_problem(problem: str, address: str) -> str | None:
    """Return why no gRPC call reaches an address, by gRPC's message; None if nothing listens there."""
    if not all(map(is_address, address.split(","))) or "errors resolving" in problem:
        return f"{address} cannot be found: give host:port, as 127.0.0.1:8500"
    if "WRONG_VERSION_NUMBER" in problem:
        return f"{address} speaks no TLS: leave out --tls-ca, or name a port that is encrypted"
    if "Failed parsing HTTP/2" in problem or "ALPN" in problem:
        return (
            f"{address} does not speak gRPC: is it the port of the HTTP API, or of metrics? "
            "`quire serve` and the logs show which port is which"
        )
    if "handshake" in problem.lower():
        return (
            f"no TLS with {address}: is --tls-ca the authority of its certificate, "
            "and the host, or --tls-name, its name? does it ask for --tls-client-cert?"
        )
    if any(end in problem for end in ("Socket closed", "Connection reset")):
        return f"{address} hangs up: if its port is encrypted, name the authority with --tls-ca"
    return None
