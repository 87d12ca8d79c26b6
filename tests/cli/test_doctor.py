"""``quire doctor``: findings, remedies and the exit status, by the settings of the command that it checks."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import trustme
from typer.testing import Result

from quire.engine.runner import processors
from quire.engine.runner.control_groups import ControlGroups
from quire.engine.runner.processors import Core
from quire.services.doctor import machine, surroundings
from quire.services.local.redis_process import RedisProcess
from quire.services.router.tenants.api_keys import Tenant, new_key

Quire = Callable[..., Result]
FREE = ("--port", "0", "--metrics-port", "0")
"""Ports that no other process on this machine may have."""


def line_of(result: Result, subject: str) -> str:
    """Return the only line about a subject, with single spaces."""
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    (line,) = (line for line in lines if line.partition(" ")[2].startswith(f"{subject} "))
    return line


def test_a_machine_without_a_problem_ends_with_status_0(quire: Quire, redis: RedisProcess) -> None:
    result = quire("doctor", "decode", "--redis-url", redis.worker_url)
    assert result.exit_code == 0, result.output
    subjects = ("packages", "gpu", "kernels", "processors", "shared memory", "model", "memory", "tls")
    for subject in (*subjects, "open files"):
        assert f" {subject} " in result.stdout
    assert line_of(result, "redis").startswith(f"ok redis 127.0.0.1:{redis.port}/0 is Redis 6.2.")
    assert redis.worker_url not in result.stdout


def test_without_a_verb_it_checks_a_local_stack(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "HTTP_PORT", "METRICS_PORT"):
        monkeypatch.setenv(f"QUIRE_{name}", "0")
    result = quire("doctor")
    assert result.exit_code == 0, result.output
    assert "ok redis a private one" in line_of(result, "redis")


def test_a_taken_port_is_a_problem_by_flag_and_by_variable(
    quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = (
            "doctor",
            "router",
            "--worker",
            "127.0.0.1:9000",
            "--metrics-port",
            "0",
            "--admin-port",
            "0",
        )
        by_flag = quire(*command, "--port", port)
        monkeypatch.setenv("QUIRE_PORT", port)
        by_variable = quire(*command)
    assert by_flag.exit_code == by_variable.exit_code == 1
    assert by_flag.stdout == by_variable.stdout
    found = f"problem port --port 127.0.0.1:{port}: Address already in use"
    assert line_of(by_flag, "port") == f"{found} end the process that listens there, or give another --port"


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
def test_a_redis_that_does_not_answer_is_a_problem_without_its_password(quire: Quire, scheme: str) -> None:
    result = quire("doctor", "router", *FREE, "--redis-url", f"{scheme}://user:hidden@127.0.0.1:1/0")
    assert result.exit_code == 1
    assert line_of(result, "redis").startswith("problem redis 127.0.0.1:1/0 gives no answer")
    assert "hidden" not in result.output


def test_a_redis_that_refuses_the_user_is_a_problem(quire: Quire, redis: RedisProcess) -> None:
    result = quire("doctor", "router", *FREE, "--redis-url", f"redis://quire-router:x@127.0.0.1:{redis.port}")
    assert result.exit_code == 1
    assert "AuthenticationError" in line_of(result, "redis")


def test_an_old_redis_is_a_problem(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "redis_version", lambda url, seconds: "6.0.16")
    result = quire("doctor", "router", *FREE, "--redis-url", "redis://127.0.0.1")
    assert (result.exit_code, "update it to 6.2 or newer" in line_of(result, "redis")) == (1, True)


def test_a_router_that_can_find_no_worker_is_a_problem(quire: Quire) -> None:
    result = quire("doctor", "router", *FREE)
    assert (result.exit_code, line_of(result, "redis").split()[0]) == (1, "problem")


def test_a_key_of_another_certificate_is_a_problem(quire: Quire, tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    authority.issue_cert("localhost").cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    other.issue_cert("localhost").private_key_pem.write_to_path(tmp_path / "key.pem")
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    result = quire("doctor", "router", *FREE, "--worker", "127.0.0.1:9000", *files)
    assert result.exit_code == 1
    assert "is not the key of" in result.stdout


def test_memory_that_does_not_suffice_is_a_problem(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "memory_bytes", lambda self: 1 << 30)
    result = quire("doctor", "decode", "--kv-memory", "2GiB")
    assert result.exit_code == 1
    assert line_of(result, "memory").startswith("problem memory 1 x weights and 1 x blocks need 2")


def test_workers_of_one_node_share_weights(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [Core(0, 0, 0, first, (first,)) for first in range(2)]
    monkeypatch.setattr(processors, "read_cores", lambda *_: cores)
    workers = ("doctor", "serve", *FREE, "--prefill", "2", "--decode", "2")
    assert "1 x weights and 4 x blocks" in line_of(quire(*workers), "memory")
    assert "4 x weights and 4 x blocks" in line_of(quire(*workers, "--tensor-parallel-size", "2"), "memory")


def test_a_folder_without_a_model_is_a_problem(quire: Quire, tmp_path: Path) -> None:
    result = quire("doctor", "prefill", str(tmp_path))
    assert (result.exit_code, line_of(result, "model").split()[0]) == (1, "problem")


def test_a_missing_package_is_a_problem(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine, "version", version)
    result = quire("doctor", "decode")
    assert (result.exit_code, "torch is not installed" in result.stdout) == (1, True)


def test_few_open_files_and_no_shared_memory_are_warnings(
    quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    monkeypatch.delattr("os.memfd_create")
    result = quire("doctor", "decode", "--redis-url", "unix:///nowhere")
    assert line_of(result, "open files").startswith("warning")
    assert line_of(result, "shared memory").startswith("warning")


def test_settings_that_the_command_refuses_are_refused(quire: Quire) -> None:
    result = quire("doctor", "router", "--port", "1", "--http-port", "1")
    assert (result.exit_code, "are both 1" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (["--lora", "a=/nonexistent"], "adapter"),
        (["--speculation", "/nonexistent"], "draft model"),
        (["--disk-cache", "/proc/none:1GiB", "--host-cache", "64MiB"], "disk cache"),
        (["/nonexistent"], "model"),
    ],
)
def test_a_folder_that_is_not_there_is_a_problem(quire: Quire, words: list[str], subject: str) -> None:
    result = quire("doctor", "decode", *words)
    assert result.exit_code == 1
    assert line_of(result, subject).startswith(f"problem {subject}")


def test_folders_that_are_there_or_can_be_made_are_no_problem(quire: Quire, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    cache = tmp_path / "new" / "cache"
    words = ["--lora", f"a={tmp_path}", "--disk-cache", f"{cache}:1GiB", "--host-cache", "64MiB"]
    result = quire("doctor", "decode", *words)
    assert result.exit_code == 0, result.output
    assert not cache.parent.exists()


def test_a_file_of_keys_is_read(quire: Quire, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(new_key(Tenant("blue")).line + "\n")
    words = ("doctor", "router", *FREE, "--worker", "127.0.0.1:9000", "--api-keys", str(keys))
    assert line_of(quire(*words), "api keys").startswith("ok api keys")
    keys.write_text("no key")
    result = quire(*words)
    assert result.exit_code == 1
    assert line_of(result, "api keys").startswith("problem api keys")
