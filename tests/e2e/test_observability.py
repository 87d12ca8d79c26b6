"""Real processes: what they report is documented, one request is one trace, dashboards show a load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from quire.observability.metric_docs import series
from quire.observability.registries import DescribedMetric, described, router_registry, worker_registry
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from tests.testing.grpc_servers import threaded_server
from tests.testing.live_run import absent_series, findings, live_run
from tests.testing.prometheus import find_prometheus, free_ports
from tests.testing.stacks import StartStack, make_prompt

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LOAD_SECONDS = 20.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans as an OpenTelemetry collector does, and keeps them by service and name."""

    def __init__(self) -> None:
        self.spans: defaultdict[str, dict[str, Span]] = defaultdict(dict)
        self.address = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans[names["service.name"]].update({span.name: span for span in scope.spans})
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    with threaded_server((add, collector)) as address:
        collector.address = f"http://{address}"
        yield collector


def test_one_request_is_one_trace_and_every_metric_is_documented(
    start_stack: StartStack, collector: Collector
) -> None:
    base = free_ports(3)
    everything: dict[str, Any] = {
        "otlp_endpoint": collector.address,
        "http_port": 0,
        "copy_answers": True,
        "host_cache_bytes": 1 << 20,
    }
    with start_stack("llama", metrics_port=base, **everything) as stack:
        with grpc.insecure_channel(stack.address) as channel:
            generation = pb.Generation(
                token_ids=pb.TokenIds(ids=make_prompt(100)),
                # Long enough for the prefill worker to hear that its push was acknowledged.
                stopping=pb.StoppingParams(max_tokens=200, ignore_eos=True),
            )
            parent = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")
            answer = GenerationServiceStub(channel).Generate(
                pb.GenerateRequest(generation=generation), metadata=[parent], timeout=60
            )
        with urlopen(f"http://{stack.http_address}/health", timeout=10) as response:
            assert response.status == 200
        assert answer.usage.blocks_shipped
        assert answer.usage.retries == 0
        check_documented(scraped(base), list(described(router_registry())))
        for port in (base + 1, base + 2):
            check_documented(scraped(port), list(described(worker_registry())))
    check_trace(collector.spans)


def check_documented(found: dict[str, set[str]], metrics: list[DescribedMetric]) -> None:
    """Check that all that is reported is documented, and what is known beforehand is there."""
    assert found.items() <= dict(series(metrics)).items()
    from_the_start = [metric for metric in metrics if all(metric.labels.values())]
    assert set(dict(series(from_the_start))) <= set(found)


def check_trace(found: dict[str, dict[str, Span]]) -> None:
    """Check the spans of one request: who has which, under which, and in which order."""
    spans = {service: found[service] for service in ("quire-router", "quire-prefill", "quire-decode")}
    assert {service: set(names) for service, names in found.items()} == {
        "quire-router": {"request", "admit", "tokenize", "turn", "lookup", "choose", "accept"},
        "quire-prefill": {
            *("prefill", "prefill_queue", "prefill_compute"),
            *("push", "credit_wait", "transfer"),
        },
        "quire-decode": {"decode", "decode_queue", "first_decode_step"},
    }
    request = spans["quire-router"]["request"]
    assert request.parent_span_id.hex() == SPAN_ID
    for root, names in (("prefill", spans["quire-prefill"]), ("decode", spans["quire-decode"])):
        assert names[root].parent_span_id == request.span_id
    for root, service in (
        ("request", "quire-router"),
        ("prefill", "quire-prefill"),
        ("decode", "quire-decode"),
    ):
        for name, span in spans[service].items():
            assert span.trace_id.hex() == TRACE_ID
            if name != root:
                assert span.parent_span_id == spans[service][root].span_id
    prefill, decode = spans["quire-prefill"], spans["quire-decode"]
    for earlier, later in (
        (request, spans["quire-router"]["lookup"]),
        (spans["quire-router"]["lookup"], spans["quire-router"]["accept"]),
        (spans["quire-router"]["accept"], prefill["prefill"]),
        (prefill["prefill_queue"], prefill["prefill_compute"]),
        (prefill["prefill_compute"], prefill["transfer"]),
        (prefill["push"], decode["first_decode_step"]),
    ):
        assert earlier.start_time_unix_nano <= later.start_time_unix_nano


def scraped(port: int) -> dict[str, set[str]]:
    """Return the series that a process reports, and their labels."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found[sample.name] |= set(sample.labels)
    return found


@pytest.mark.skipif(
    find_prometheus() is None,
    reason="no prometheus on PATH (apt install prometheus); names and labels are checked without one",
)
def test_dashboards_and_alerts_see_a_loaded_stack() -> None:
    binary = find_prometheus()
    assert binary is not None
    with live_run(binary, LOAD_SECONDS) as run:
        assert list(findings(run)) == []
        assert [rule["lastError"] for rule in run.prometheus.rules() if rule["health"] != "ok"] == []
        # No revision of this stack lacks a worker.
        assert absent_series(run) == ['quire_revision_workers{state="waiting"}']
        assert run.prometheus.query("quire_revision_workers")
