"""One trace for each request, across router and workers; nothing at all where no endpoint is configured.

The parent comes with a call's metadata as W3C ``traceparent`` and goes on to the workers the same way. This
module knows no OpenTelemetry: ``otel_tracing`` does, and is imported only if spans have somewhere to go.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Protocol

Metadata = Sequence[tuple[str, str]]
Headers = Iterable[tuple[str, str | bytes]]


class MissingTracingError(RuntimeError):
    """Tracing was asked for, and what it needs is not installed."""


class Span(Protocol):
    """A span that has begun; it ends with its context."""

    @property
    def metadata(self) -> Metadata | None:
        """What a call to another process carries to make its spans children of this one."""

    def part(self, name: str, start: float, end: float) -> None:
        """Add a child that has ended, by readings of the tracer's clock."""

    def set(self, **attributes: str | int | float) -> None:
        """Set attributes; ``__`` in a name stands for a dot."""


class Tracer(Protocol):
    """Begins the spans of one process."""

    def span(self, name: str, headers: Headers) -> AbstractContextManager[Span]:
        """Begin a span under the one that a call's metadata or HTTP headers name, or a new trace."""


class _NoSpan:
    """Records nothing."""

    metadata: Metadata | None = None

    def part(self, name: str, start: float, end: float) -> None:
        """Drop it."""

    def set(self, **attributes: str | int | float) -> None:
        """Drop them."""


NO_SPAN: Span = _NoSpan()


class NoTracer:
    """Traces nothing, at the cost of a call."""

    def span(self, name: str, headers: Headers) -> AbstractContextManager[Span]:
        """Return the span that records nothing."""
        return nullcontext(NO_SPAN)


@asynccontextmanager
async def open_tracer(
    endpoint: str | None, *, service: str, instance: str, clock: Callable[[], float]
) -> AsyncIterator[Tracer]:
    """Send spans to an OTLP endpoint, as ``http://host:4317``; without one, trace nothing.

    Raises:
        MissingTracingError: there is an endpoint, and the extra ``tracing`` is not installed.
    """
    if endpoint is None:
        yield NoTracer()
        return
    try:
        from quire.services.otel_tracing import otlp_tracer
    except ImportError as error:
        raise MissingTracingError(
            f"--otlp-endpoint needs the extra 'tracing': pip install 'quire[tracing]' ({error})"
        ) from error
    async with otlp_tracer(endpoint, service=service, instance=instance, clock=clock) as tracer:
        yield tracer
