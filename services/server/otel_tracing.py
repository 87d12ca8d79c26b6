"""Records spans with OpenTelemetry and sends them over OTLP.

``OTEL_TRACES_SAMPLER`` decides which requests are traced; by default all are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.rpc.errors import ServiceError

EXPORT_SECONDS = 5.0
"""Time limit for sending a batch of spans; if the collector takes longer, the batch is lost."""

_propagator = TraceContextTextMapPropagator()


class OtelSpan:
    """A span that has begun; see ``tracing.Span``."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, clock: Callable[[], float]) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._context = trace.set_span_in_context(span, Context())

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for a call to another process, which makes that process's spans children of this one."""
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, context=self._context)
        return tuple(carrier.items())

    def part(self, name: str, start: float, end: float) -> None:
        """Add a child span that has already ended; the times are readings of the tracer's clock."""
        if self._span.is_recording():
            begun = time.time_ns() - _nanoseconds(self._clock() - start)
            child = self._tracer.start_span(name, context=self._context, start_time=begun)
            child.end(begun + _nanoseconds(end - start))

    def set(self, **attributes: str | int | float) -> None:
        """Set attributes; ``__`` in a name stands for a dot."""
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", "."), value)


class OtelTracer:
    """Begins spans with a provider's tracer.

    Args:
        clock: clock by which the times given to ``OtelSpan.part`` are read.
    """

    def __init__(self, provider: TracerProvider, clock: Callable[[], float]) -> None:
        self._tracer = provider.get_tracer("quire")
        self._clock = clock

    @contextmanager
    def span(self, name: str, headers: Iterable[tuple[str, str | bytes]]) -> Iterator[OtelSpan]:
        """Begin a span as a child of the one in the headers; an exception sets the span's error status."""
        carrier = {key.lower(): value for key, value in headers if isinstance(value, str)}
        parent = _propagator.extract(carrier, context=Context())
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        try:
            yield OtelSpan(self._tracer, span, self._clock)
        except (asyncio.CancelledError, GeneratorExit):
            span.set_attribute("error.type", "CANCELLED")
            raise
        except BaseException as error:
            kind = error.code.name if isinstance(error, ServiceError) else type(error).__name__
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            raise
        finally:
            span.end()


@asynccontextmanager
async def otlp_tracer(
    endpoint: str, *, service: str, instance: str, clock: Callable[[], float]
) -> AsyncIterator[OtelTracer]:
    """Yield a tracer whose spans a thread sends in batches; the remaining spans are sent at the end."""
    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https:"), timeout=EXPORT_SECONDS
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield OtelTracer(provider, clock)
    finally:
        await asyncio.to_thread(provider.shutdown)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
