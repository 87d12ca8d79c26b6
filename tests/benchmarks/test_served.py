"""The comparison of servers: streams, figures, and a real process as a server."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from quire.benchmarks.peers import clients, served
from quire.benchmarks.peers.clients import completion_body, http_record, http_sender, run_batches, usage_of
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.served import Figures, figures_of
from quire.benchmarks.peers.servers import Server, free_ports
from quire.benchmarks.peers.workloads import WORKLOADS, Requests
from quire.cli.bench.summary import OK

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices":[{"text":"a"}]}\\n\\n')
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.wfile.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\\n\\n")
    def log_message(self, *args):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
SLOW, FAST = Figures(100.0, 40.0, 80.0, 2.0), Figures(200.0, 10.0, 20.0, 0.0)


def start_server(tmp_path: Path, code: str = SERVER) -> Server:
    ports = free_ports()
    return Server([sys.executable, "-c", code, str(ports.http)], {}, ports, tmp_path / "logs" / "server.log")


def test_token_counts_at_the_end_of_a_stream() -> None:
    assert usage_of(b'data: {"choices":[{"text":"a"}]}\n\n' + USAGE) == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }
    assert usage_of(b'data: {"choices":[{"text":"a"}]}\n\n') is None
    assert usage_of(b"") is None


def test_records_of_responses() -> None:
    record = http_record(200, USAGE, [2.0, 3.0], due=1.0)
    assert (record.status, record.ttft_seconds, record.tpot_seconds) == (OK, 1.0, 1.0)
    assert (record.prompt_tokens, record.output_tokens) == (3, 2)
    assert http_record(400, b"no such model", [], due=1.0).status == "HTTP 400: no such model"
    assert http_record(200, b'data: {"error":"out of memory"}\n\n', [2.0], due=1.0).status != OK


def test_requests_are_streamed_and_greedy() -> None:
    body = completion_body((4, 5), 7)
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([4, 5], 7, 0.0)
    assert body["stream"]
    assert body["ignore_eos"]


def test_a_server_answers_in_its_turn_only(tmp_path: Path) -> None:
    async def answer(server: Server) -> Figures:
        async with server.turn(), http_sender(server.http_url) as send:
            return figures_of(await run_batches(send, [Requests([[1, 2], [3]], [4, 5])]))

    with start_server(tmp_path) as server:
        for _ in range(2):
            figures = asyncio.run(answer(server))
            assert all(map(math.isfinite, figures))
    with pytest.raises(URLError):
        urlopen(server.http_url)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SideFailedError, match="its process ended"):
        start_server(tmp_path, "raise SystemExit(3)")


def test_sides_are_compared_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_turn(side: str, server: object, batches: Sequence[Requests]) -> Figures:
        return SLOW if side == "vllm" else FAST

    monkeypatch.setattr(served, "run_turn", run_turn)
    server: Any = None
    rows, failures = served.measure(WORKLOADS["mixed"], {"quire": server, "vllm": server}, 320, 2)
    assert not failures
    assert [row["tokens_per_second"] for row in rows] == [200.0, 100.0]
    assert [row["ratios"]["ttft_p50_ms"] for row in rows] == [0.25, None]


def test_a_server_that_never_answers_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "ANSWER_SECONDS", 0.05)

    async def status() -> str:
        held = []
        server = await asyncio.start_server(lambda *stream: held.append(stream), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, http_sender(f"http://127.0.0.1:{port}") as send:
            record = await send([1], 2, 0.0)
            for _, writer in held:
                writer.close()
        return record.status

    assert asyncio.run(status()) == "TimeoutError"
