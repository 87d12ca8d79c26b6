"""Opens the tracer of a process, as its settings ask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.services.server.tracing import NoTracer, Tracer


class MissingTracingError(RuntimeError):
    """Tracing is configured, but the packages that it needs are not installed."""


@asynccontextmanager
async def open_tracer(
    endpoint: str | None, *, service: str, instance: str, clock: Callable[[], float]
) -> AsyncIterator[Tracer]:
    """Yield a tracer that sends spans to an OTLP endpoint; without an endpoint it traces nothing.

    Args:
        endpoint: such as ``http://host:4317``.

    Raises:
        MissingTracingError: there is an endpoint, but the extra ``tracing`` is not installed.
    """
    if endpoint is None:
        yield NoTracer()
        return
    try:
        from quire.services.server.otel_tracing import otlp_tracer
    except ImportError as error:
        raise MissingTracingError(
            "--otlp-endpoint needs the extra 'tracing': in quire's clone, run "
            f".venv/bin/pip install -e '.[tracing]' ({error})"
        ) from error
    async with otlp_tracer(endpoint, service=service, instance=instance, clock=clock) as tracer:
        yield tracer
