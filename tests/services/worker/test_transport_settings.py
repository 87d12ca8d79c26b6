"""What the setting of the transport asks for, and what becomes of a worker that cannot share its pool."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import KvHeads
from quire.kvindex.kv_layout import KvShape
from quire.services.worker.blocks import transports
from quire.services.worker.blocks.transports import open_transports
from quire.services.worker.config import WorkerConfig
from quire.services.worker.lifecycle import models
from quire.settings.setting import SettingError

SHAPE = KvShape(1, 1, 4, 8, "float16")
CPU = torch.device("cpu")


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="quire-") as path:
        yield path


def config(transport: Any, directory: str | None = None) -> WorkerConfig:
    return WorkerConfig(role="decode", num_blocks=4, transport=transport, transport_dir=directory)


def pool(transport: Any) -> KvMemory:
    heads = KvHeads(1, 1, 8, ())
    model: Any = SimpleNamespace(own_kv_heads=None, shared_bytes=0, heads=heads, kv_shape=lambda *_: SHAPE)
    return models._allocate_pool(config(transport), model, None, CPU, None)


def test_a_pool_is_shared_unless_messages_are_chosen() -> None:
    assert pool("auto").descriptor is not None
    assert pool("messages").descriptor is None


def test_without_shared_memory_the_pool_is_private_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "allocate_shared", Mock(side_effect=OSError("no memfd_create")))
    log = Mock()
    monkeypatch.setattr(models, "_log", log)
    assert pool("auto").descriptor is None
    [line] = log.warning.call_args_list
    assert line.args == ("pool_not_shared",)


async def test_the_pool_is_offered_in_the_directory(directory: str) -> None:
    opened = open_transports(config("auto", directory), "epoch", pool("auto"))
    assert opened.offer.epoch == "epoch"
    assert names(directory) == ["epoch.sock"]
    opened.close()
    assert names(directory) == []


async def test_where_messages_are_chosen_nothing_is_offered(directory: str) -> None:
    opened = open_transports(config("messages", directory), "epoch", pool("messages"))
    assert not opened.offer.boot_id
    assert names(directory) == []


@pytest.mark.parametrize("problem", ["private pool", "open directory"])
async def test_a_pool_that_cannot_be_offered_is_read_in_messages(
    directory: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = pool("messages" if problem == "private pool" else "auto")
    if problem == "open directory":
        directory += "/open"
        os.mkdir(directory, 0o755)
    log = Mock()
    monkeypatch.setattr(transports, "_log", log)
    assert not open_transports(config("auto", directory), "epoch", memory).offer.boot_id
    [line] = log.info.call_args_list
    assert (line.args, line.kwargs["transport"]) == (("kv_transport",), "messages")


def test_a_plug_in_is_refused_if_blocks_are_several_frames() -> None:
    shape = KvShape(2, 1, 4, 8, "float16", window=6, window_layers=(0,))
    with pytest.raises(SettingError, match="--transport nixl is not possible: a block of a model that mixes"):
        open_transports(config("nixl"), "epoch", KvMemory(shape, 4, CPU))


def test_an_unknown_transport_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match="--transport must be one of auto, messages, nixl; got 'pigeon'"):
        config("pigeon")


def names(directory: str) -> list[str]:
    return [path.name for path in Path(directory).iterdir()]
