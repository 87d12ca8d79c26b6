"""What goes over the wire: events, headers, statuses, error bodies, the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import ClientSession
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from quire.rpc.errors import InvalidArgument
from quire.rpc.server import bind_problem
from quire.services.router.grpc.open_calls import OpenCalls
from quire.services.router.grpc.request_memory import RequestMemory
from quire.services.router.http.server import http_server
from quire.services.router.http.shared.errors import _STATUS
from quire.services.router.tenants.api_keys import Tenant
from quire.services.server.otel_tracing import OtelTracer
from tests.testing.api_keys import write_keys
from tests.testing.until import until

PROMPT = {"prompt": "say it", "max_tokens": 50}
CHAT = {"messages": [{"role": "user", "content": "say it"}]}


async def post(http: ClientSession, path: str, body: Any, **options: Any) -> tuple[int, Any]:
    async with http.post(path, json=body, **options) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_a_stream_is_events_that_end_with_done(http: ClientSession, path: str, body: Any) -> None:
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["X-Accel-Buffering"] == "no"
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert all("usage" not in event for event in events)


async def test_the_response_has_the_request_id_of_the_client(http: ClientSession) -> None:
    async with http.post("/v1/completions", json=PROMPT, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.json())["id"] == "cmpl-mine"
    status, body = await post(http, "/v1/completions", PROMPT, headers={"X-Request-Id": "two words"})
    assert (status, body["error"]["param"]) == (400, "X-Request-Id")
    status, body = await post(http, "/v1/completions", {**PROMPT, "request_id": "two words"})
    assert (status, body["error"]["param"]) == (400, "request_id")


async def test_errors_have_the_request_id(http: ClientSession) -> None:
    headers = {"X-Request-Id": "mine"}
    for path, body in (("/v1/completions", {}), ("/v1/none", {}), ("/v1/completions", {"prompt": 5})):
        async with http.post(path, json=body, headers=headers) as response:
            assert (response.ok, response.headers["X-Request-Id"]) == (False, "mine")
    async with http.post("/v1/completions", json={"request_id": "named", "prompt": "x" * 100}) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (400, "named")
    async with http.post("/v1/none", headers={"X-Request-Id": "two words \xff"}) as response:
        assert re.fullmatch("[0-9a-f]{32}", response.headers["X-Request-Id"])


async def test_each_prompt_of_a_request_with_the_longest_id_has_one(
    http: ClientSession, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    body = {**PROMPT, "prompt": ["a", "b"], "request_id": "x" * 128}
    async with http.post("/v1/completions", json=body) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (200, "x" * 128)
    ended = [r.__dict__["fields"]["request_id"] for r in caplog.records if r.msg == "request_finished"]
    assert sorted(ended) == ["x" * 126 + "-0", "x" * 126 + "-1"]


FIELDS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "/v1/completions": [
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[1], "x"]}, "prompt.1", "valid array"),
        ({"prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": None}, "prompt", "field required"),
        ({"prompt": 5}, "prompt", "valid string; or input should be a valid"),
        ({"prompt": [[1], [2, "x"]]}, "prompt.1.1", "valid integer"),
        ({"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        ({"priority": 101}, "priority", "less than or equal to 100"),
        ({"prompt": [9999]}, "prompt[0]", "below 320"),
        ({"prompt": "x" * 100}, "prompt", "maximum context length is 64 tokens"),
        ({"prompt": "\ud800"}, "body", "Invalid JSON"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"temperture": 1}, "temperture", "not a field"),
        ({"suffix": "x"}, "suffix", "should be ''"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"n": 3, "best_of": 2}, "best_of", "from n = 3"),
        ({"best_of": 2, "use_beam_search": True, "n": 2}, "best_of", "width"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ""}, "stop[0]", "from 1 to 256"),
        ({"stop_token_ids": [999]}, "stop_token_ids[0]", "below 320"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "below 320"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "valid integer"),
        ({"top_k": 999}, "top_k", "320"),
        ({"length_penalty": 1.0}, "length_penalty", "use_beam_search"),
        ({"use_beam_search": True}, "n", "from 2 to 64"),
        (
            {"use_beam_search": True, "n": 2, "length_penalty": 2000},
            "length_penalty",
            "less than or equal to 10",
        ),
        ({"temperature": 1e39}, "temperature", "less than or equal to 1000000"),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "min_tokens", "leaves no token"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"cache_salt": "x" * 129}, "cache_salt", "at most 128"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"prompt": ["x"] * 257}, "prompt", "at most 256 items"),
        ({"prompt": ["x"] * 256 + [1]}, "prompt", "at most 256 items"),
        ({"prompt": ["x", "x" * 100]}, "prompt[1]", "maximum context length is 64 tokens"),
        ({"prompt": [[1], [2, 9999]]}, "prompt[1][1]", "below 320"),
        ({"stop": ["a"] * 17, "n": 2}, "stop", "stop: list should have at most 16"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json", "from 1 to"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "from 1 to"),
        ({"structured_outputs": {"choice": ["x" * 99999]}}, "structured_outputs.choice", "from 1 to"),
        ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs", "with use_beam_search"),
    ],
    "/v1/chat/completions": [
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "x"}]}, "messages.0.role", "'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content.0.type",
            "'text'",
        ),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "field required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
            "field required",
        ),
        ({"verbosity": "x"}, "verbosity", "'medium'"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
            "field required",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "does not show it any tools"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"x": "x" * 99999}},
                }
            },
            "response_format",
            "from 1 to",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        (
            {"messages": [{"role": "user", "content": "x" * 100}]},
            "messages",
            "maximum context length is 64 tokens",
        ),
        ({"response_format": {"type": "y" * 999}}, "response_format", "y…"),
    ],
    "/tokenize": [({"prompt": None}, "prompt", "or messages")],
    "/detokenize": [({"tokens": [320]}, "tokens[0]", "below 320")],
}


async def test_the_invalid_field_is_named(http: ClientSession) -> None:
    valid: dict[str, dict[str, Any]] = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}
    for path, (change, param, problem) in ((path, row) for path, rows in FIELDS.items() for row in rows):
        status, body = await post(http, path, {**valid.get(path, {}), **change})
        error = body["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert problem in error["message"]
        assert ("; or " in error["message"]) == ("; or " in problem), (
            "alternatives that fit worse are not named"
        )
        assert len(error["message"]) < 400


async def test_the_error_of_an_unknown_route_names_the_list_of_routes(http: ClientSession) -> None:
    status, body = await post(http, "/v1/chat/completion", CHAT)
    error = body["error"]
    assert (status, error["type"], error["code"]) == (404, "not_found_error", "not_found")
    assert error["message"] == (
        "there is no route POST /v1/chat/completion; GET /openapi.json lists the routes"
    )
    async with http.get("/" + "x" * 5000) as response:
        assert (response.status, len((await response.json())["error"]["message"]) < 600) == (404, True)


async def test_a_wrong_method_is_refused_with_the_allowed_ones(http: ClientSession) -> None:
    async with http.get("/v1/chat/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_allowed")
    assert error["message"] == "/v1/chat/completions takes POST, not GET"


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/messages", 400, "invalid_request_error"),
        ("/v1/messages/count_tokens", 400, "invalid_request_error"),
        ("/v1/messages/batches", 404, "not_found_error"),
    ],
)
async def test_anthropics_clients_can_read_their_errors(
    http: ClientSession, path: str, status: int, kind: str
) -> None:
    got, body = await post(http, path, {}, headers={"X-Request-Id": "mine"})
    assert (got, body["type"], body["error"]["type"], body["request_id"]) == (status, "error", kind, "mine")


async def test_a_long_value_is_cut_where_it_is_repeated(http: ClientSession) -> None:
    status, body = await post(http, "/v1/completions", {**PROMPT, "model": "m" * 5000})
    assert (status, "m" * 200 + "…" in body["error"]["message"]) == (404, True)
    assert len(body["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "say", "structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"prompt": "say", "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"prompt": "say", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_a_refusal_of_a_worker_has_the_field_name_of_the_request(
    http: ClientSession, pair: Any, fault: Any, body: Any, field: str
) -> None:
    kind = "grammar" if field.endswith("choice") else "json_schema"
    pair.change("decode", fault=fault(0, InvalidArgument(f"format.{kind}", "cannot be compiled")))
    pair.change("prefill", fault=fault(0, InvalidArgument(f"format.{kind}", "cannot be compiled")))
    status, answer = await post(http, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["message"] == f"{field}: cannot be compiled"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [("/v1/completions", PROMPT, "prompt"), ("/v1/chat/completions", CHAT, "messages")],
)
async def test_a_prompt_that_a_worker_refuses_has_the_name_that_was_sent(
    http: ClientSession, pair: Any, fault: Any, path: str, body: Any, field: str
) -> None:
    pair.change(fault=fault(0, InvalidArgument("token_ids", "needs more blocks than there are")))
    status, answer = await post(http, path, body)
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/completions",
            {"suffix": "", "priority": 0, "include_stop_str_in_output": False, "prediction": None},
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
                    }
                ],
                "functions": None,
                "function_call": None,
                "stream_options": {"include_usage": True, "other": None},
                "structured_outputs": {"regex": "a", "json": None},
                "verbosity": "medium",
                "add_generation_prompt": True,
                "continue_final_message": False,
                "parallel_tool_calls": False,
            },
        ),
    ],
)
async def test_default_fields_of_clients_are_accepted(http: ClientSession, path: str, fields: Any) -> None:
    status, body = await post(http, path, {**(PROMPT if path == "/v1/completions" else CHAT), **fields})
    assert status == 200, body


async def test_the_server_header_is_quire(http: ClientSession) -> None:
    for path in ("/health", "/none", "/v1/models"):
        assert (await http.get(path)).headers["Server"] == "quire"


async def test_the_version_endpoint(http: ClientSession) -> None:
    async with http.get("/version") as response:
        assert re.match(r"\d+", (await response.json())["version"])


async def test_requests_that_the_api_does_not_have(http: ClientSession) -> None:
    json_type = {"Content-Type": "application/json"}
    for send, status, code in (
        (http.post("/v1/completions", data=b"{"), 415, "unsupported_media_type"),
        (http.post("/v1/completions", data=b"{", headers=json_type), 400, "invalid_json"),
        (http.post("/v1/completions", data=b"[]", headers=json_type), 400, "invalid_json"),
        (
            http.post("/v1/completions", data=io.BytesIO(bytes((16 << 20) + 1)), headers=json_type),
            413,
            "request_entity_too_large",
        ),
        (http.get("/v1/models/other"), 404, "model_not_found"),
    ):
        async with send as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (status, code)
        assert error["message"]


async def test_a_full_router_sends_retry_after(start: Any, pair: Any) -> None:
    http = await start(max_requests=1)
    pair.change(pause_before_token=0)
    first = asyncio.create_task(post(http, "/v1/completions", PROMPT))
    await until(lambda: pair.metric("quire_router_requests_running"))
    async with http.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        assert response.status == 429
        assert (response.headers["Retry-After"], response.headers["Retry-After-Ms"]) == ("1", "1000")
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    status, _ = await post(http, "/v1/completions", {**PROMPT, "prompt": ["a", "b"]})
    assert status == 429
    first.cancel()
    await until(lambda: not pair.metric("quire_router_requests_running"))


async def test_more_answers_than_the_router_takes_are_a_bad_request(start: Any) -> None:
    http = await start(max_requests=2)
    status, body = await post(http, "/v1/completions", {**PROMPT, "n": 3})
    assert (status, body["error"]["param"]) == (400, "n")
    assert "must be at most 2" in body["error"]["message"]
    status, body = await post(http, "/v1/completions", {**PROMPT, "prompt": ["a", "b"], "n": 2})
    assert status == 200
    assert len(body["choices"]) == 4


async def test_without_workers_it_lives_and_is_not_ready(cluster: Any) -> None:
    await cluster.start(http_port=0)
    async with ClientSession(f"http://{cluster.running.http.address}") as http:
        alive, ready = await http.get("/health"), await http.get("/ready")
        assert (alive.status, await alive.json()) == (200, {"status": "alive", "reason": ""})
        assert (ready.status, ready.headers["Retry-After"]) == (503, "1")
        assert await ready.json() == {"status": "not_ready", "reason": "no worker has joined yet"}
        status, body = await post(http, "/v1/completions", PROMPT)
        assert (status, body["error"]["code"]) == (503, "no_worker")


async def test_metrics_count_the_answers(http: ClientSession) -> None:
    await post(http, "/v1/completions", PROMPT)
    await http.get("/x/y")
    assert (await http.head("/metrics")).status == 200
    async with http.get("/metrics") as response:
        text = await response.text()
    assert 'quire_http_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'quire_http_requests_total{route="unknown",status="404"} 1.0' in text
    assert "quire_time_to_first_token_seconds_count 1.0" in text


@pytest.mark.parametrize("accept", ["text/plain; version=x", "application/openmetrics-text; version=1.0-rc1"])
async def test_an_unknown_version_of_metrics_gets_the_usual_one(http: ClientSession, accept: str) -> None:
    async with http.get("/metrics", headers={"Accept": accept}) as response:
        assert response.status == 200
        assert response.content_type == "text/plain"


async def test_text_becomes_tokens_and_text_again(http: ClientSession) -> None:
    status, tokens = await post(
        http, "/tokenize", {"prompt": "hello world", "add_special_tokens": False, "return_token_strs": True}
    )
    assert (status, tokens["count"], tokens["max_model_len"]) == (200, len(tokens["tokens"]), 64)
    assert "".join(tokens["token_strs"]) == "hello world"
    _, text = await post(http, "/detokenize", {"tokens": tokens["tokens"]})
    assert text == {"prompt": "hello world"}
    _, with_special = await post(http, "/tokenize", {"prompt": "hello world"})
    assert with_special["tokens"] == [0, *tokens["tokens"]]
    _, chat = await post(http, "/tokenize", {"messages": CHAT["messages"]})
    _, text = await post(http, "/detokenize", {"tokens": chat["tokens"]})
    assert text["prompt"] == "<s><|user|>say it</s>\n<|assistant|>"


async def test_the_tokenizer_is_described(http: ClientSession) -> None:
    async with http.get("/tokenizer_info") as response:
        info = await response.json()
    assert (info["bos_token"], info["eos_token"], info["eos_token_ids"]) == ("<s>", "</s>", [1])
    assert "message.role" in info["chat_template"]


async def test_the_openapi_document_has_every_route_and_resolves(http: ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        text = await response.text()
    document = json.loads(text)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"]
    assert document["openapi"] == "3.2.0"
    paths = set(document["paths"])
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model}"} <= paths
    completion = document["components"]["schemas"]["CompletionRequest"]
    assert completion["additionalProperties"] == {"type": "null"}
    assert completion["required"] == ["prompt"]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert {str(status) for status in _STATUS.values()} <= set(operation["responses"])


async def test_the_headers_authorize_a_call(pair: Any, tmp_path: Path) -> None:
    keys, [key] = write_keys(tmp_path, Tenant("blue"))
    await pair.start(api_keys_file=keys, http_port=0)
    async with ClientSession(f"http://{pair.running.http.address}") as http:
        status, body = await post(http, "/v1/completions", PROMPT)
        assert (status, body["error"]["code"]) == (401, "no_api_key")
        assert (await http.get("/v1/models")).headers["WWW-Authenticate"] == "Bearer"
        assert (await http.get("/metrics")).status == 401
        assert (await http.get("/metrics", headers={"X-Api-Key": key})).status == 200
        headers = {"Authorization": f"Bearer {key}"}
        assert (await http.get("/metrics", headers=headers)).status == 200
        # Waits until the workers have joined, which readiness does not.
        answer = await http.post("/v1/completions", json=PROMPT, headers=headers)
        assert answer.status == 200
        assert (await http.get("/ready")).status == 200


@pytest.mark.parametrize(("tenant", "router"), [(2, 1024), (None, 3)])
async def test_prompts_of_one_request_do_not_refuse_each_other(
    pair: Any, tmp_path: Path, tenant: int | None, router: int
) -> None:
    keys, [key] = write_keys(tmp_path, Tenant("blue", max_requests=tenant))
    await pair.start(api_keys_file=keys, http_port=0, max_requests=router)
    headers = {"Authorization": f"Bearer {key}"}
    async with ClientSession(f"http://{pair.running.http.address}", headers=headers) as http:
        status, body = await post(http, "/v1/completions", {**PROMPT, "prompt": ["say it"] * 8})
        assert status == 200
        assert [choice["text"] for choice in body["choices"]] == ["hello world, stop here"] * 8
        async with http.post(
            "/v1/completions", json={**PROMPT, "prompt": ["say it"] * 8, "stream": True}
        ) as response:
            assert (await response.text()).count('"finish_reason":"stop"') == 8


async def test_a_clients_trace_is_continued(start: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    @contextlib.asynccontextmanager
    async def opened(*arguments: Any, clock: Any, **options: Any) -> AsyncIterator[OtelTracer]:
        yield OtelTracer(provider, clock)

    monkeypatch.setattr("quire.services.router.app.open_tracer", opened)
    http = await start()
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await post(http, "/v1/completions", PROMPT, headers={"traceparent": f"00-{trace_id}-{span_id}-01"})
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "request"]
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (int(trace_id, 16), int(span_id, 16))


async def test_the_response_to_a_bug_has_no_details(
    http: ClientSession, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = AsyncMock(side_effect=RuntimeError("the secret of the house"))
    monkeypatch.setattr("quire.services.router.grpc.servicer.validate", broken)
    for stream in (False, True):
        status, body = await post(http, "/v1/completions", {**PROMPT, "stream": stream})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert "secret" not in json.dumps(body)


async def test_a_taken_port_is_an_error(pair: Any) -> None:
    await pair.start(http_port=0)
    with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
        servicer: Any = SimpleNamespace(calls=OpenCalls())
        memory = RequestMemory(0, pair.running.metrics)
        async with http_server(servicer, CollectorRegistry(), memory, port=pair.running.http.port):
            pass


@pytest.mark.skipif(bind_problem("[::1]", 0) is not None, reason="needs an IPv6 loopback address")
async def test_it_listens_on_an_ipv6_address(pair: Any) -> None:
    await pair.start(host="[::1]", http_port=0)
    async with ClientSession(f"http://{pair.running.http.address}") as http:
        assert (await http.get("/health")).status == 200


async def test_many_connections_wait_to_be_accepted(http: ClientSession, pair: Any) -> None:
    host, _, port = pair.running.http.address.rpartition(":")
    with ExitStack() as stack:
        for _ in range(300):  # this function blocks the event loop, which accepts none of them meanwhile
            stack.enter_context(socket.create_connection((host, int(port)), timeout=0.9))


async def test_many_concurrent_requests_and_disconnects(http: ClientSession, pair: Any) -> None:
    async def ask(number: int) -> str | None:
        body = {**CHAT, "stream": bool(number % 2), "seed": number}
        async with http.post("/v1/chat/completions", json=body) as response:
            if number % 3 == 0:
                response.close()
                return None
            text = await response.text()
        if number % 2 == 0:
            return str(json.loads(text)["choices"][0]["message"]["content"])
        events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    answers = await asyncio.gather(*map(ask, range(60)))
    assert {answer for number, answer in enumerate(answers) if number % 3} == {"hello world, stop here"}
    await until(lambda: not pair.metric("quire_router_requests_running"))


async def test_a_client_that_sends_too_slowly_is_disconnected(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.services.router.http.server.CALL_MARGIN_SECONDS", 0.1)
    http = await start(request_timeout_seconds=0.1)
    address = http._base_url
    assert address is not None
    reader, writer = await asyncio.open_connection(address.host, address.port)
    lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    writer.write("\r\n".join((*lines, "Content-Length: 99", "", "{")).encode())
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()
