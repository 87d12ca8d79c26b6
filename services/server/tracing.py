"""Traces each request across router and workers, if an endpoint for the spans is configured.

The parent span comes in a call's metadata as W3C ``traceparent`` and is passed on to the workers in the same
way. This module does not import OpenTelemetry: ``otel_tracing`` does, and ``open_tracer`` imports it only if
there is an endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
