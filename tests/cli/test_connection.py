"""Verbs that speak to a router or a worker whose port is encrypted, and asks for a certificate."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest
import trustme
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import Result

from quire.cli.example import ask_example
from quire.protos.inference_pb2_grpc import add_GenerationServiceServicer_to_server
from quire.rpc.tls import TlsFiles, server_credentials
from tests.testing.certificates import write_certificate
from tests.testing.commands import run_command
from tests.testing.grpc_servers import threaded_server

Quire = Callable[..., Result]
NAME = "quire.example"


class Secured(NamedTuple):
    """A server behind mutual TLS, and the options of verbs that reach it."""

    address: str
    options: dict[str, str]

    def flags(self, *without: str) -> list[str]:
        """Return the options as flags."""
        return [part for flag, value in self.options.items() if flag not in without for part in (flag, value)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    """Return the files of a server and of its client; one authority has signed both."""
    folder, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    names = {"server": NAME, "client": "client.example"}
    return {end: write_certificate(ca, folder, name) for end, name in names.items()}


@pytest.fixture
def secured(files: dict[str, TlsFiles], fake_generation: Any) -> Iterator[Secured]:
    """Serve the fake router, and its health, to who shows a certificate."""
    healthy, client = health.HealthServicer(), files["client"]
    healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    options = {
        "--tls-ca": str(client.authority),
        "--tls-name": NAME,
        "--tls-client-cert": str(client.certificate),
        "--tls-client-key": str(client.key),
    }
    with threaded_server(
        (add_GenerationServiceServicer_to_server, fake_generation),
        (health_pb2_grpc.add_HealthServicer_to_server, healthy),
        credentials=server_credentials(files["server"]),
    ) as address:
        yield Secured(address, options)


def arguments(verb: str, address: str) -> list[str]:
    """Return the arguments of a short call."""
    match verb:
        case "health":
            return ["health", address]
        case "simulate":
            return ["simulate", "--calibrate", address, "--max-num-seqs", "1", "--num-requests", "1"]
        case "bench":
            load = ["--num-requests", "1", "--num-warmups", "0", "--input-len", "8", "--output-len", "2"]
            return ["bench", "serve", "--address", address, *load]
        case _:
            return [verb, *["Hi"][: verb == "generate"], "--address", address]


@pytest.mark.parametrize("verb", ["health", "generate", "chat", "bench"])
@pytest.mark.parametrize("is_by_variable", [False, True])
def test_a_verb_shows_a_certificate_and_expects_a_name(
    quire: Quire, secured: Secured, monkeypatch: pytest.MonkeyPatch, verb: str, is_by_variable: bool
) -> None:
    flags = secured.flags()
    if is_by_variable:
        flags = []
        for flag, value in secured.options.items():
            monkeypatch.setenv("QUIRE_" + flag.removeprefix("--").replace("-", "_").upper(), value)
    result = quire(*arguments(verb, secured.address), *flags, stdin="Hi\n")
    assert result.exit_code == 0, result.output
    assert {"health": "ready", "bench": '"num_requests": 1'}.get(verb, "Blue is é🙂.") in result.stdout


@pytest.mark.parametrize("verb", ["health", "generate"])
@pytest.mark.parametrize("absent", [["--tls-name"], ["--tls-client-cert", "--tls-client-key"]])
def test_without_name_or_certificate_no_server_answers(
    quire: Quire, secured: Secured, verb: str, absent: list[str]
) -> None:
    result = quire(*arguments(verb, secured.address), *secured.flags(*absent))
    assert (result.exit_code, result.stderr[:6]) == (1, "error:")
    assert secured.address in result.stderr


@pytest.mark.parametrize("verb", ["health", "generate", "chat", "bench", "simulate"])
@pytest.mark.parametrize(
    ("absent", "problem"),
    [("--tls-ca", "need --tls-ca"), ("--tls-client-key", "needs both"), ("--tls-client-cert", "needs both")],
)
def test_half_of_it_is_a_usage_error(
    quire: Quire, secured: Secured, verb: str, absent: str, problem: str
) -> None:
    result = quire(*arguments(verb, secured.address), *secured.flags(absent))
    assert result.exit_code == 2
    assert problem in result.stderr


def test_the_example_reads_the_variables(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, value in secured.options.items():
        monkeypatch.setenv("QUIRE_" + flag.removeprefix("--").replace("-", "_").upper(), value)
    ask_example(secured.address)
    assert "Blue is é🙂." in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_a_key_that_cannot_be_sent_is_a_usage_error(
    quire: Quire, monkeypatch: pytest.MonkeyPatch, fake_generation: Any, verb: str
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret\n")
    result = quire(*arguments(verb, fake_generation.address))
    assert result.exit_code == 2
    assert "api_key must be printable ASCII without line breaks" in result.stderr
    assert "secret" not in result.stderr


def test_an_example_with_a_key_that_cannot_be_sent_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_generation: Any
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret\n")
    ask_example(fake_generation.address)
    problem = "api_key must be printable ASCII without line breaks"
    assert capsys.readouterr().err == f"the example failed: {problem}\n"


def test_an_example_whose_output_is_closed_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_generation: Any
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        ask_example(fake_generation.address)
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            closed.close()
    assert capsys.readouterr().err == "the example failed: [Errno 32] Broken pipe\n"


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_an_answer_whose_output_is_closed_ends_without_output(
    command: list[str], fake_generation: Any, verb: str
) -> None:
    with subprocess.Popen(
        [*command, *arguments(verb, fake_generation.address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, problem = process.communicate("Hi\n", timeout=30)
    assert (process.returncode, problem) == (1, "")


@pytest.fixture
def http_address() -> Iterator[str]:
    """Serve HTTP/1.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("verb", ["health", "generate", "chat", "bench"])
def test_an_http_port_is_reported(quire: Quire, http_address: str, verb: str) -> None:
    result = quire(*arguments(verb, http_address), stdin="Hi\n")
    assert result.exit_code == 1
    assert f"{http_address} does not speak gRPC: is it the port of the HTTP API" in result.stderr


@pytest.mark.parametrize("verb", ["health", "generate"])
def test_an_encrypted_port_is_reported(quire: Quire, secured: Secured, verb: str) -> None:
    result = quire(*arguments(verb, secured.address))
    assert (result.exit_code, result.stderr[:6]) == (1, "error:")
    assert f"{secured.address} hangs up" in result.stderr
    assert "name the authority with --tls-ca" in result.stderr


@pytest.mark.parametrize("verb", ["health", "generate"])
@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:8500"])
def test_a_malformed_address_is_reported(quire: Quire, verb: str, address: str) -> None:
    result = quire(*arguments(verb, address))
    assert result.exit_code == 1
    assert "give host:port, as 127.0.0.1:8500" in result.stderr


@pytest.mark.parametrize("verb", ["health", "generate"])
def test_a_server_with_another_protocol_is_reported(quire: Quire, verb: str) -> None:
    with threaded_server() as address:
        result = quire(*arguments(verb, address))
    assert result.exit_code == 1
    assert f"{address} speaks gRPC but" in result.stderr


def test_grpc_itself_prints_nothing(command: list[str], http_address: str) -> None:
    done = run_command(*command, "health", http_address, "--timeout", "5", status=1)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["generate", "chat", "bench"])
def test_another_router_answers_for_a_stopped_one(quire: Quire, fake_generation: Any, verb: str) -> None:
    result = quire(*arguments(verb, f"127.0.0.1:1,{fake_generation.address}"), stdin="Hi\n")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("addresses", ["a:1,a:1", "a:1,", ""])
def test_routers_are_named_once_each(quire: Quire, addresses: str) -> None:
    result = quire("chat", "--address", addresses)
    assert result.exit_code == 2
    assert "a:8500,b:8500" in result.stderr
