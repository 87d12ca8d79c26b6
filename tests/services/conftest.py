"""A served model, authorities that sign certificates, and channels that ping often."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import trustme

from quire.client import router_client
from quire.client.channel import channel_options
from quire.rpc import channels
from quire.rpc import server as grpc_server
from quire.rpc.channels import CHANNEL_OPTIONS
from quire.rpc.server import server_options
from quire.rpc.tls import TlsFiles
from quire.services.requests.served_model import ServedModel
from quire.services.router.workers import worker
from quire.services.server.tracing import NoTracer
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files

if TYPE_CHECKING:
    from quire.services.worker.parts import WorkerParts

VOCAB_SIZE = 320
PING_SPEED = 20
"""Hastened pings come this many times as often; gRPC sends no more than one a second."""
PING_INTERVALS = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")


class Authority:
    """Signs certificates and writes them to files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.file = folder / f"ca-{id(self)}.pem"
        self.ca.cert_pem.write_to_path(str(self.file))

    def other(self) -> Authority:
        """Return an authority that this one's clients do not know."""
        return Authority(self.folder)

    def issue(self, name: str, *, days: int = 1) -> TlsFiles:
        """Write a certificate for a name; a negative number of days makes one that has expired."""
        until = datetime.now(UTC) + timedelta(days=days)
        issued = self.ca.issue_cert(name, not_before=until - timedelta(days=400), not_after=until)
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.file)
        files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files.key.write_bytes(issued.private_key_pem.bytes())
        return files


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def model(model_folder: Path, tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="tiny",
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({1}),
        block_size=4,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(load_model_files(str(model_folder))),
        descriptors=lambda: [b"tiny"],
    )


@pytest.fixture
def make_parts() -> Callable[..., WorkerParts]:
    """Return a maker of a worker's parts: requests and reader are real, others not given are mocks."""
    # They load torch, which tests of the router do without.
    from quire.services.worker.parts import WorkerParts
    from quire.services.worker.reports.request_loads import RequestLoads
    from quire.services.worker.requests.running_requests import RunningRequests
    from quire.services.worker.requests.sequence_reader import SequenceReader
    from quire.services.worker.state import WorkerState

    def make(**given: Any) -> WorkerParts:
        parts = {field.name: Mock() for field in fields(WorkerParts)} | given
        parts["requests"] = RunningRequests(
            parts["engine"], parts["state"], parts["prompts"].phases, NoTracer(), RequestLoads(Mock())
        )
        parts["reader"] = SequenceReader(parts["identity"], WorkerState("decode"), Mock())
        return WorkerParts(**parts)

    return make


@pytest.fixture
def hastened_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the intervals of pings by ``PING_SPEED``, those sent and those allowed."""

    def hasten(options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(name, value // PING_SPEED if name in PING_INTERVALS else value) for name, value in options]

    monkeypatch.setattr(
        grpc_server, "server_options", lambda *limits, **sharing: hasten(server_options(*limits, **sharing))
    )
    monkeypatch.setattr(router_client, "channel_options", lambda: hasten(channel_options()))
    for module in (channels, worker):
        monkeypatch.setattr(module, "CHANNEL_OPTIONS", hasten(CHANNEL_OPTIONS))
