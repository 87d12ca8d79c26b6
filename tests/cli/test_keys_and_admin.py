"""``quire keys`` and ``quire admin``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from typer.testing import Result

from quire.protos import admin_pb2 as pb
from quire.protos.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from quire.services.router.tenants.api_keys import ApiKeys
from tests.testing.grpc_servers import threaded_server

Quire = Callable[..., Result]


class FakeAdmin(AdminServiceServicer):
    """A router with one worker, that records what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.address = ""
        self.elastic_roles = ""

    def ListWorkers(self, request: Any, context: Any) -> pb.ListWorkersResponse:
        load = pb.WorkerLoad(num_running=3, used_blocks=7)
        workers = [
            pb.WorkerStatus(worker_id="decode-0", role="decode", address="host:1", load=load),
            pb.WorkerStatus(worker_id="prefill-0", role="prefill", address="host:2"),
        ]
        return pb.ListWorkersResponse(workers=workers, elastic_roles=self.elastic_roles)

    def DrainWorker(self, request: Any, context: Any) -> pb.DrainWorkerResponse:
        self.requests.append(request)
        if request.worker_id == "lost":
            context.abort(grpc.StatusCode.NOT_FOUND, "no worker 'lost'")
        return pb.DrainWorkerResponse()

    def ChangeWorkerRole(self, request: Any, context: Any) -> pb.ChangeWorkerRoleResponse:
        self.requests.append(request)
        return pb.ChangeWorkerRoleResponse()

    def ClearWorkerCaches(self, request: Any, context: Any) -> pb.ClearWorkerCachesResponse:
        self.requests.append(request)
        return pb.ClearWorkerCachesResponse(num_blocks={"decode-0": 12})

    def ChangeLogLevel(self, request: Any, context: Any) -> pb.ChangeLogLevelResponse:
        self.requests.append(request)
        return pb.ChangeLogLevelResponse(worker_ids=["decode-0"])

    def AddAdapter(self, request: Any, context: Any) -> pb.AddAdapterResponse:
        self.requests.append(request)
        return pb.AddAdapterResponse(digest="0123")

    def RemoveAdapter(self, request: Any, context: Any) -> pb.RemoveAdapterResponse:
        self.requests.append(request)
        return pb.RemoveAdapterResponse()


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdmin]:
    servicer = FakeAdmin()
    with threaded_server((add_AdminServiceServicer_to_server, servicer)) as servicer.address:
        monkeypatch.setenv("QUIRE_ADMIN_ADDRESS", servicer.address)
        yield servicer


def test_a_key_goes_to_the_terminal_and_its_line_to_the_file(quire: Quire, tmp_path: Path) -> None:
    result = quire("keys", "new", "acme", "--tokens-per-minute", "600", "--max-requests", "2")
    assert result.exit_code == 0
    (tmp_path / "keys").write_text(result.stdout)
    key = result.stderr.split()[-1]
    assert key not in result.stdout
    tenant = ApiKeys(tmp_path / "keys").authenticate([("authorization", f"Bearer {key}")])
    assert (tenant.name, tenant.tokens_per_minute, tenant.max_requests) == ("acme", 600, 2)


def test_a_name_that_a_file_cannot_hold_is_a_usage_error(quire: Quire) -> None:
    assert quire("keys", "new", "a b").exit_code == 2


def test_workers_are_a_table(quire: Quire, admin: FakeAdmin) -> None:
    lines = [line for line in quire("admin", "workers").stdout.splitlines() if "host:" in line]
    assert [("serving" in line, "silent" in line, " 7 " in line) for line in lines] == [
        (True, False, True),
        (False, True, False),
    ]


def test_elastic_roles_are_described_below_the_workers(quire: Quire, admin: FakeAdmin) -> None:
    assert "elastic" not in quire("admin", "workers").stdout
    admin.elastic_roles = "TTFT 40%"
    assert quire("admin", "workers").stdout.splitlines()[-1] == "elastic roles: TTFT 40%"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["scale", "decode=99999999999"], "num_workers"),
        (["drain", "\udcff"], "worker_id"),
        (["role", "\udcff", "decode"], "worker_id"),
        (["clear-cache", "\udcff"], "worker_ids"),
        (["add-adapter", "a", "\udcff"], "path"),
        (["remove-adapter", "\udcff"], "name"),
    ],
)
def test_a_value_that_fits_no_field_is_named(
    quire: Quire, admin: FakeAdmin, arguments: list[str], field: str
) -> None:
    result = quire("admin", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: {field}: ")
    assert not admin.requests


def test_drain_clear_and_log_level_send_their_calls(quire: Quire, admin: FakeAdmin) -> None:
    assert "drains" in quire("admin", "drain", "decode-0").stdout
    assert "serves again" in quire("admin", "drain", "decode-0", "--undo").stdout
    assert quire("admin", "clear-cache", "decode-0").stdout == "decode-0: 12 blocks\n"
    assert quire("admin", "role", "decode-0", "prefill").stdout == "decode-0 is a prefill worker now\n"
    assert quire("admin", "role", "decode-0", "both").exit_code == 2
    assert "log debug" in quire("admin", "log-level", "debug").stdout
    assert admin.requests == [
        pb.DrainWorkerRequest(worker_id="decode-0"),
        pb.DrainWorkerRequest(worker_id="decode-0", undo=True),
        pb.ClearWorkerCachesRequest(worker_ids=["decode-0"]),
        pb.ChangeWorkerRoleRequest(worker_id="decode-0", role="prefill"),
        pb.ChangeLogLevelRequest(level=pb.LOG_LEVEL_DEBUG),
    ]


def test_errors_are_reported(quire: Quire, admin: FakeAdmin) -> None:
    lost = quire("admin", "drain", "lost")
    assert (lost.exit_code, lost.stderr) == (1, "error: no worker 'lost'\n")
    result = quire("admin", "workers", "--admin-address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no router's admin port answers at 127.0.0.1:1" in result.stderr


def test_a_port_other_than_the_admin_port_is_reported(quire: Quire, fake_generation: Any) -> None:
    result = quire("admin", "workers", "--admin-address", fake_generation.address)
    assert result.exit_code == 1
    assert "is another port than a router's admin port" in result.stderr


@pytest.mark.parametrize("option", ["--api-keys", "--tls-cert"])
def test_a_malformed_file_is_reported_in_one_line(quire: Quire, tmp_path: Path, option: str) -> None:
    path = tmp_path / "malformed"
    path.write_text("nonsense")
    key = ["--tls-key", str(path)] if option == "--tls-cert" else []
    result = quire(
        "router", "--port", "0", "--metrics-port", "0", "--admin-port", "0", option, str(path), *key
    )
    assert (result.exit_code, result.stderr.count("error: ")) == (1, 1)
    assert "malformed" in result.stderr


def test_a_connection_without_the_requested_encryption_is_reported(
    quire: Quire, fake_generation: Any, tmp_path: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options = ["--address", fake_generation.address, "--tls-ca", str(tmp_path / "ca.pem")]
    result = quire("generate", "hello", *options)
    assert result.exit_code == 1
    assert f"{fake_generation.address} speaks no TLS" in result.stderr


def test_an_adapter_is_added_and_removed_by_name(quire: Quire, admin: FakeAdmin) -> None:
    assert "digest 0123" in quire("admin", "add-adapter", "sql", "folder").stdout
    assert quire("admin", "remove-adapter", "sql").exit_code == 0
    assert admin.requests == [
        pb.AddAdapterRequest(name="sql", path="folder"),
        pb.RemoveAdapterRequest(name="sql"),
    ]
