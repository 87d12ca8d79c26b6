"""Traces each request across router and workers, if an endpoint for the spans is configured.

The parent span comes in a call's metadata as W3C ``traceparent`` and is passed on to the workers in the same
way. Only ``otel_tracing``, which implements the protocols below, imports OpenTelemetry, and ``open_tracer``
imports it only if there is an endpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Protocol

Metadata = Sequence[tuple[str, str]]
Headers = Iterable[tuple[str, str | bytes]]


class Span(Protocol):
    """A span that has begun; it ends when its context ends."""

    @property
    def metadata(self) -> Metadata | None:
        """Metadata for a call to another process, which makes that process's spans children of this one."""

    def part(self, name: str, start: float, end: float) -> None:
        """Add a child span that has already ended; the times are readings of the tracer's clock."""

    def set(self, **attributes: str | int | float) -> None:
        """Set attributes; ``__`` in a name stands for a dot."""


class Tracer(Protocol):
    """Begins the spans of one process."""

    def span(self, name: str, headers: Headers) -> AbstractContextManager[Span]:
        """Begin a span as a child of the one in a call's metadata or HTTP headers, or else in a new trace."""


class _NoSpan:
    """A span that records nothing."""

    metadata: Metadata | None = None

    def part(self, name: str, start: float, end: float) -> None:
        """Ignore the child span."""

    def set(self, **attributes: str | int | float) -> None:
        """Ignore the attributes."""


NO_SPAN: Span = _NoSpan()


class NoTracer:
    """A tracer that traces nothing and costs only a function call."""

    def span(self, name: str, headers: Headers) -> AbstractContextManager[Span]:
        """Return the span that records nothing."""
        return nullcontext(NO_SPAN)


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
            "OTEL_EXPORTER_OTLP_ENDPOINT needs the extra 'tracing': in quire's clone, run "
            f".venv/bin/pip install -e '.[tracing]' ({error})"
        ) from error
    async with otlp_tracer(endpoint, service=service, instance=instance, clock=clock) as tracer:
        yield tracer
