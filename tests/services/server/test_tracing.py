"""Spans: their parents, their times, how they end; and nothing at all without an endpoint."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from quire.rpc.errors import Unavailable
from quire.services.server.otel_tracing import OtelTracer
from quire.services.server.tracing import NO_SPAN, MissingTracingError, NoTracer, open_tracer
from tests.testing.commands import run_command

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """A tracer and the spans that it ended."""

    def __init__(self, **settings: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, **settings)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.now = 100.0
        self.tracer = OtelTracer(self.provider, lambda: self.now)

    def __getitem__(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def test_a_clients_trace_continues_across_processes(spans: Spans) -> None:
    client: list[tuple[str, str | bytes]] = [
        ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01"),
        ("x-bin", b"\xff"),
    ]
    with spans.tracer.span("request", client) as router, spans.tracer.span("prefill", router.metadata or ()):
        pass
    request, prefill = spans["request"], spans["prefill"]
    assert request.parent is not None
    assert (request.parent.trace_id, request.parent.span_id) == (int(TRACE_ID, 16), int(SPAN_ID, 16))
    assert prefill.parent is not None
    assert (prefill.parent.trace_id, prefill.parent.span_id) == ids(request)
    assert request.parent.is_remote
    assert prefill.parent.is_remote


def test_requests_without_a_parent_begin_traces_of_their_own(spans: Spans) -> None:
    for name in ("one", "two"):
        with spans.tracer.span(name, ()):
            pass
    assert spans["one"].parent is None
    assert ids(spans["one"])[0] != ids(spans["two"])[0]


def test_parts_have_the_times_they_were_given(spans: Spans) -> None:
    with spans.tracer.span("request", ()) as span:
        spans.now += 3.0
        span.part("lookup", spans.now - 2.0, spans.now - 0.5)
    lookup, request = spans["lookup"], spans["request"]
    assert lookup.parent is not None
    assert (lookup.parent.trace_id, lookup.parent.span_id) == ids(request)
    assert lookup.start_time is not None
    assert lookup.end_time is not None
    assert request.end_time is not None
    assert lookup.end_time - lookup.start_time == 1_500_000_000
    assert 500_000_000 <= request.end_time - lookup.end_time < 2_000_000_000


def test_attributes_have_dotted_names(spans: Spans) -> None:
    with spans.tracer.span("request", ()) as span:
        span.set(gen_ai__usage__input_tokens=5, quire__request_id="r")
    assert dict(spans["request"].attributes or {}) == {
        "gen_ai.usage.input_tokens": 5,
        "quire.request_id": "r",
    }


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (Unavailable("no worker"), "UNAVAILABLE", StatusCode.ERROR),
        (ValueError("x"), "ValueError", StatusCode.ERROR),
        (asyncio.CancelledError(), "CANCELLED", StatusCode.UNSET),
    ],
)
def test_an_exception_ends_the_span_and_is_named(
    spans: Spans, error: BaseException, kind: str, status: StatusCode
) -> None:
    with pytest.raises(type(error)), spans.tracer.span("request", ()):
        raise error
    assert (spans["request"].attributes or {})["error.type"] == kind
    assert spans["request"].status.status_code is status


def test_workers_learn_that_a_trace_is_not_sampled() -> None:
    spans = Spans(sampler=ALWAYS_OFF)
    with spans.tracer.span("request", ()) as span:
        span.part("lookup", 0.0, 1.0)
        flags = dict(span.metadata or ())["traceparent"].rpartition("-")[2]
        assert not int(flags, 16) & 1
    assert spans.exporter.get_finished_spans() == ()


async def test_without_an_endpoint_nothing_is_traced() -> None:
    async with open_tracer(None, service="s", instance="i", clock=lambda: 0.0) as tracer:
        assert isinstance(tracer, NoTracer)
        with tracer.span("request", ()) as span:
            assert span is NO_SPAN
            assert span.metadata is None
            span.part("lookup", 0.0, 1.0)
            span.set(x=1)


async def test_an_endpoint_without_the_extra_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quire.services.server.otel_tracing", None)
    remedy = r"pip install -e '\.\[tracing\]'"
    with pytest.raises(MissingTracingError, match=remedy):
        async with open_tracer("http://127.0.0.1:4317", service="s", instance="i", clock=lambda: 0.0):
            pass


def test_services_load_no_exporter_by_themselves() -> None:
    # redis-py imports OpenTelemetry's metrics where it finds them.
    program = (
        "import sys, quire.services.router.app, quire.services.worker.config\n"
        "print([name for name in sys.modules if 'otel_tracing' in name or 'opentelemetry.exporter' in name])"
    )
    assert run_command(sys.executable, "-c", program).stdout.strip() == "[]"
