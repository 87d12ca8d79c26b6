"""A stack that cannot serve its model says so before it starts anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quire.models.file_checks import ModelFileError
from quire.models.source import demo_model_path
from quire.rpc.errors import BadFileError
from quire.services.local import local_launcher
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.worker.config import WorkerConfig


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
