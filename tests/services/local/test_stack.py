"""A stack that cannot serve its model says so before it starts anything."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from quire.models.file_checks import ModelFileError
from quire.models.source import demo_model_path
from quire.rpc.errors import BadFileError
from quire.services.launch.launcher import LaunchError
from quire.services.local import local_launcher
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisNotStartedError, RedisProcess
from quire.services.local.stack import RunningStack, WorkerConfigs, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from quire.settings.setting import MAX_PORT


def never_opened(*_: object) -> object:
    raise AssertionError("workers would load the model")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_text("{"), r"tokenizer\.json is not a tokenizer"),
        (Path.unlink, r"no tokenizer\.json"),
    ],
)
def test_a_damaged_tokenizer_ends_the_start_before_workers_load(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    damage(folder / "tokenizer.json")
    config = LocalStackConfig(worker=WorkerConfig(role="decode", model=str(folder)))
    with (
        pytest.raises(BadFileError, match=message),
        local_stack(config, Console(quiet=True), never_opened),  # type: ignore[arg-type]
    ):
        pass


def test_damaged_weights_end_the_start_before_workers_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launcher, "fork_server", never_opened)
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    os.truncate(folder / "model.safetensors", 1 << 20)
    config = LocalStackConfig(worker=WorkerConfig(role="decode", model=str(folder)))
    with (
        pytest.raises(ModelFileError, match=r"model\.safetensors ends in tensor model\."),
        local_stack(config, Console(quiet=True)),
    ):
        pass


def test_a_damaged_gguf_file_ends_the_start_before_workers_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_launcher, "fork_server", never_opened)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03")
    config = LocalStackConfig(worker=WorkerConfig(role="decode", model=str(tmp_path / "model.gguf")))
    with (
        pytest.raises(ModelFileError, match=r"model\.gguf has a damaged header"),
        local_stack(config, Console(quiet=True)),
    ):
        pass


def test_a_stack_starts_its_redis_again(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Mock(seconds=None, **{"waitables.return_value": [], "events.return_value": []})
    with RedisProcess() as redis:
        stack = RunningStack(Mock(), nothing, nothing, Mock(), Mock(), redis=redis)
        first = redis.pid
        os.kill(first, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(redis, "_start", Mock(side_effect=RedisNotStartedError("no memory")))
            stack.wait()
            assert redis.sentinel is None
        stack.wait()
        assert redis.sentinel is not None
        assert redis.pid != first


@pytest.mark.parametrize("is_taken", [False, True])
def test_workers_get_metrics_ports_that_are_free(is_taken: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        if not is_taken:
            listening.close()
        router = RouterConfig(port=0, metrics_port=port - 1)
        config = LocalStackConfig(worker=WorkerConfig(role="decode"), router=router)
        given = WorkerConfigs(config, None, b"")("decode-0").metrics_port
    assert given > port if is_taken else given == port


def test_metrics_ports_end() -> None:
    router = RouterConfig(port=0, metrics_port=MAX_PORT)
    make = WorkerConfigs(LocalStackConfig(worker=WorkerConfig(role="decode"), router=router), None, b"")
    with pytest.raises(LaunchError, match="no free port above --metrics-port for the metrics of decode-0"):
        make("decode-0")
