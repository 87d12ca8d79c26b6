"""The settings of the verbs that serve."""

from __future__ import annotations

import io
import multiprocessing.connection
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console
from typer.testing import Result

from quire.cli.sizes import format_size, parse_size
from quire.engine.runner.processors import Core
from quire.models.source import demo_model_path
from quire.routing.placement import PolicyConfig
from quire.services import worker_process
from quire.services.local import stack as local_stack
from quire.services.local.child_processes import end_of
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisNotStartedError
from quire.services.router import app, public_servers
from quire.services.router.config import DEFAULT_HTTP_PORT, RouterConfig
from quire.services.worker.config import DiskFolder, WorkerConfig
from tests.testing.commands import run_command

pytestmark = pytest.mark.slow

Quire = Callable[..., Result]


@pytest.fixture
def router_configs(monkeypatch: pytest.MonkeyPatch) -> list[RouterConfig]:
    """Return the configurations that the verb ``router`` would run."""
    configs: list[RouterConfig] = []

    async def run_router(config: RouterConfig) -> None:
        configs.append(config)

    monkeypatch.setattr(app, "run_router", run_router)
    return configs


def test_a_flag_beats_the_environment_which_beats_the_default(
    quire: Quire, router_configs: list[RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    quire("router")
    monkeypatch.setenv("QUIRE_PORT", "7000")
    quire("router")
    quire("router", "--port", "7001")
    assert [config.port for config in router_configs] == [8500, 7000, 7001]


def test_targets_and_traces_reach_the_router(
    quire: Quire, router_configs: list[RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    quire("router")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")
    quire("router", "--slo-ttft-ms", "250", "--slo-tpot-ms", "40")
    default, given = router_configs
    assert (default.slo.ttft_seconds, default.slo.tpot_seconds, default.otlp_endpoint) == (1.0, 0.1, None)
    assert (given.slo.ttft_seconds, given.slo.tpot_seconds) == (0.25, 0.04)
    assert given.otlp_endpoint == "http://c:4317"


def test_workers_may_be_listed(
    quire: Quire, router_configs: list[RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    quire("router", "--worker", "a:1", "--worker", "b:2")
    monkeypatch.setenv("QUIRE_WORKER", "c:3 d:4")
    quire("router")
    assert [config.worker_addresses for config in router_configs] == [("a:1", "b:2"), ("c:3", "d:4")]


def test_a_worker_listed_twice_is_a_usage_error(quire: Quire, router_configs: list[RouterConfig]) -> None:
    result = quire("router", "--worker", "a:1", "--worker", "b:2", "--worker", "a:1")
    assert (result.exit_code, router_configs) == (2, [])
    assert "--worker names a:1 more than once" in result.stderr


def test_how_requests_are_placed_is_a_setting(
    quire: Quire, router_configs: list[RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    quire("router", "--local-prefill-tokens", "5")
    (config,) = router_configs
    assert config.placing == PolicyConfig(local_prefill_tokens=5)
    served: list[LocalStackConfig] = []
    monkeypatch.setattr(local_stack, "run", lambda config, on_ready: served.append(config))
    monkeypatch.setenv("QUIRE_LOCAL_PREFILL_TOKENS", "6")
    quire("serve")
    assert served[0].router.placing == PolicyConfig(local_prefill_tokens=6)


def test_serve_asks_an_example_once_ready(
    quire: Quire, monkeypatch: pytest.MonkeyPatch, fake_generation: Any
) -> None:
    def run(config: LocalStackConfig, on_ready: Callable[[str], None]) -> None:
        assert (config.num_prefill, config.num_decode) == (2, 3)
        assert (config.worker.model, config.router.port) == (None, 0)
        on_ready(fake_generation.address)
        for thread in threading.enumerate():
            if thread.name == "example":
                thread.join(10)

    monkeypatch.setattr(local_stack, "run", run)
    result = quire("serve", "--example", "--prefill", "2", "--decode", "3", "--port", "0")
    assert result.exit_code == 0, result.output
    assert "Blue is é🙂." in result.stdout
    assert "32 cached" in result.stdout
    assert f"{sys.argv[0]} chat --address {fake_generation.address}" in result.stdout


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_gets_its_settings(quire: Quire, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    configs: list[WorkerConfig] = []
    monkeypatch.setattr(worker_process, "run_worker", configs.append)
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "hush-hush")
    result = quire(role, "some/model", "--kv-memory", "64MiB", "--dtype", "float32", "--port", "7100")
    assert result.exit_code == 0, result.output
    (config,) = configs
    assert (config.role, config.model, config.port) == (role, "some/model", 7100)
    assert (config.kv_memory_bytes, config.dtype, config.block_size) == (64 << 20, "float32", 16)
    assert config.cluster_secret == b"hush-hush"


@pytest.mark.parametrize("guess", [["--speculation", "ngram"], ["--num-speculative-tokens", "2"]])
def test_prefill_workers_guess_nothing(quire: Quire, guess: list[str]) -> None:
    result = quire("prefill", *guess)
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_decode_workers_and_stacks_guess(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[WorkerConfig] = []
    monkeypatch.setattr(worker_process, "run_worker", configs.append)
    monkeypatch.setattr(local_stack, "run", lambda config, on_ready: configs.append(config.worker))
    for verb in ("decode", "serve"):
        quire(verb, "--speculation", "ngram", "--num-speculative-tokens", "2", "--block-size", "8")
    guesses = [(each.speculation, each.num_speculative_tokens, each.block_size) for each in configs]
    assert guesses == [("ngram", 2, 8)] * 2


def test_workers_of_a_stack_differ_in_what_is_theirs(tmp_path: Path) -> None:
    template = WorkerConfig(
        role="decode", model="m", host_cache_bytes=1, disk_cache=DiskFolder(str(tmp_path), 9)
    )
    config = LocalStackConfig(
        num_prefill=1, num_decode=2, router=RouterConfig(metrics_port=7000), worker=template
    )
    found = local_stack.worker_configs(config, local_stack.WorkerConfigs(config, "redis://r", b"secret"))
    assert list(found) == ["prefill-0", "decode-0", "decode-1"]
    assert [each.role for each in found.values()] == ["prefill", "decode", "decode"]
    assert [each.metrics_port for each in found.values()] == [7001, 7002, 7003]
    assert {each.disk_cache and each.disk_cache.path for each in found.values()} == {
        str(tmp_path / name) for name in found
    }
    assert {(each.model, each.redis_url, each.cluster_secret) for each in found.values()} == {
        ("m", "redis://r", b"secret")
    }


@pytest.mark.parametrize(
    ("given", "has_gpu", "expected"),
    [
        ({}, False, "prefill-0 prefill-1 decode-0 decode-1"),
        ({}, True, "prefill-0 decode-0"),
        ({"num_prefill": 0}, False, "decode-0"),
        ({"num_decode": 2}, False, "prefill-0 decode-0 decode-1"),
    ],
)
def test_a_machine_of_four_nodes_begins_with_four_workers(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], has_gpu: bool, expected: str
) -> None:
    cores = [Core(node, node, node, node, (node,)) for node in range(4)]
    monkeypatch.setattr(local_stack, "read_cores", lambda processors: cores)
    monkeypatch.setattr(local_stack, "share_of_quota", lambda num_workers, index: 64)
    monkeypatch.setattr(local_stack, "has_gpu_driver", lambda: has_gpu)
    config = LocalStackConfig(**given)
    found = local_stack.worker_configs(config, local_stack.WorkerConfigs(config, None, b""))
    assert " ".join(found) == expected


def test_workers_of_a_stack_do_not_use_the_metrics_ports_of_its_routers(tmp_path: Path) -> None:
    router = RouterConfig(port=7000, http_port=7002, metrics_port=7001, admin_port=7003)
    config = LocalStackConfig(num_prefill=1, num_decode=2, router=router)
    make = local_stack.WorkerConfigs(config, "redis://r", b"secret")
    found = local_stack.worker_configs(config, make)
    assert [each.metrics_port for each in found.values()] == [7004, 7005, 7006]
    assert make("decode-1").metrics_port == 7006


@pytest.mark.parametrize(
    ("verb", "settings", "message"),
    [
        ("router", ["--port", "7000", "--http-port", "7000"], "--port and --http-port are both 7000"),
        ("router", ["--port", "8501"], "--port and --metrics-port are both 8501"),
        ("serve", ["--metrics-port", "8502"], "--http-port and --metrics-port are both 8502"),
        ("serve", ["--admin-port", "8500"], "--port and --admin-port are both 8500"),
        (
            "router",
            ["--admin-port", "9100", "--metrics-port", "9000", "--router-processes", "2"],
            "--metrics-port + 100 and --admin-port are both 9100",
        ),
        ("decode", ["--port", "7000", "--metrics-port", "7000"], "--port and --metrics-port are both 7000"),
        ("decode", ["--kv-memory", "64MiB", "--num-blocks", "10"], "not both"),
    ],
)
def test_settings_that_contradict_each_other_are_a_usage_error(
    quire: Quire, verb: str, settings: list[str], message: str
) -> None:
    result = quire(verb, *settings)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_failed_start_is_reported_in_one_line(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=OSError("cannot listen on 127.0.0.1:80"))
    monkeypatch.setattr(worker_process, "run_worker", failing)
    result = quire("decode")
    assert (result.exit_code, result.stderr) == (1, "error: cannot listen on 127.0.0.1:80\n")


def test_a_stack_without_redis_is_reported_in_one_line(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=RedisNotStartedError("no redis-server on PATH"))
    monkeypatch.setattr(local_stack, "run", failing)
    result = quire("serve")
    assert (result.exit_code, result.stderr) == (1, "error: no redis-server on PATH\n")


def test_the_secret_is_not_shown(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "hush-hush")
    assert "hush-hush" not in quire("router", "--help").output


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("1K", 1024), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("2gb", 2 << 30)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1PiB", "12x"])
def test_a_malformed_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (65536, "64.0 KiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_a_bad_size_is_a_usage_error(quire: Quire) -> None:
    result: Any = quire("serve", "--kv-memory", "12x")
    assert result.exit_code == 2
    assert "512MiB" in result.stderr


def test_serve_has_http_where_its_packages_are(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int | None] = []
    monkeypatch.setattr(local_stack, "run", lambda config, on_ready: ports.append(config.router.http_port))
    quire("serve")
    quire("serve", "--http-port", "0")
    monkeypatch.setattr(public_servers, "has_http", lambda: False)
    quire("serve")
    assert ports == [8502, 0, None]


def test_admin_finds_a_stack_on_its_usual_ports(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    routers: list[RouterConfig] = []
    monkeypatch.setattr(local_stack, "run", lambda config, on_ready: routers.append(config.router))
    quire("serve")
    quire("serve", "--port", "0")
    quire("serve", "--port", "0", "--admin-port", "9000")
    assert [each.chosen_admin_port for each in routers] == [8503, 0, 9000]


def test_a_routers_default_ports_differ(quire: Quire, router_configs: list[RouterConfig]) -> None:
    quire("router", "--http-port", str(DEFAULT_HTTP_PORT))
    [config] = router_configs
    ports = {config.port, config.metrics_port, config.chosen_admin_port, config.http_port}
    assert ports == {8500, 8501, 8502, 8503}


def test_a_router_without_the_packages_names_the_extra_to_install(
    quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_servers, "has_http", lambda: False)
    result = quire("router", "--port", "0", "--metrics-port", "0", "--http-port", "0")
    assert result.exit_code == 1
    assert "in quire's clone, run .venv/bin/pip install -e '.[http]'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--port", "65536"], "65535"),
        (["--redis-url", "localhost:6379"], "begins with redis://"),
        (["--worker", "worker"], "'worker' is not host:port"),
        (["--worker", "worker:99999"], "'worker:99999' is not host:port"),
        (["--host", "::1"], "must have brackets around an IPv6 address"),
        (["--slo-ttft-ms", "0"], "must be above 0; got 0"),
        (["--slo-tpot-ms", "nan"], "must be above 0; got nan"),
    ],
)
def test_a_setting_that_cannot_be_right_is_a_usage_error(
    quire: Quire, router_configs: list[RouterConfig], arguments: list[str], problem: str
) -> None:
    result = quire("router", *arguments)
    assert (result.exit_code, router_configs) == (2, [])
    assert problem in result.stderr


def test_the_grace_period_is_a_setting_of_serve(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[LocalStackConfig] = []
    monkeypatch.setattr(local_stack, "run", lambda config, on_ready: served.append(config))
    quire("serve")
    quire("serve", "--grace-period", "3")
    assert [config.router.grace_seconds for config in served] == [25, 3]
    assert [config.worker.grace_seconds for config in served] == [25, 3]


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("import sys; sys.exit(3)", "ended with exit code 3"),
        ("import time; time.sleep(60)", "was killed by SIGKILL"),
    ],
)
def test_the_end_of_a_process_is_reported(program: str, end: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=exec, args=(program,))
    process.start()
    if "sleep" in program:
        process.kill()
    multiprocessing.connection.wait([process.sentinel])
    assert end_of(process) == end


def test_a_missing_model_is_reported_in_one_line(command: list[str], tmp_path: Path) -> None:
    done = run_command(*command, "decode", tmp_path / "missing", status=1)
    assert (
        done.stderr
        == f"error: cannot load the model {tmp_path / 'missing'}: there is no folder {tmp_path / 'missing'}\n"
    )


def test_a_stack_reports_that_it_waits_for_redis() -> None:
    console = Console(file=io.StringIO())
    local_stack._warn_of_redis("redis://:secret@127.0.0.1:1/0", console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert said.startswith("waiting for Redis, which does not answer at 127.0.0.1:1/0: ")
    assert "secret" not in said


@pytest.mark.parametrize(
    ("name", "verb", "message"),
    [
        (
            "model.safetensors",
            "decode",
            "error: cannot load the model {folder}: {folder}/model.safetensors ends in its header",
        ),
        ("model.safetensors", "serve", "quire serve: {folder}/model.safetensors ends in its header"),
        ("tokenizer.json", "serve", "quire serve: cannot load the files of {folder}: "),
    ],
)
def test_a_model_with_a_damaged_file_ends_the_command_with_one_sentence(
    command: list[str], tmp_path: Path, name: str, verb: str, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    os.truncate(folder / name, 100)
    ports = ["--port", "0"] if verb == "decode" else ["--port", "0", "--http-port", "0"]
    done = run_command(*command, verb, folder, "--num-blocks", "64", *ports, status=1, timeout=120)
    assert done.stderr.strip().startswith(message.format(folder=folder))
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("verb", ["serve", "prefill", "decode"])
def test_workers_without_their_packages_name_the_extra_to_install(
    quire: Quire, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("quire.cli.processes.find_spec", lambda name: None)
    result = quire(verb)
    assert result.exit_code == 1
    assert "in quire's clone, run .venv/bin/pip install -e '.[worker]'" in result.stderr
