"""Which workers may open NIXL, and which peers they read."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from quire.kvtransfer.errors import NotSharedError
from quire.kvtransfer.transports import nixl
from quire.kvtransfer.transports.interface import OwnPool
from quire.kvtransfer.transports.nixl import NixlPools, open_transports
from quire.protos import kvtransfer_pb2 as pb
from tests.testing.forked import Forked
from tests.testing.transport_pair import running_pair

POOL = OwnPool("epoch", 0, 0, "cpu", is_divided=False, has_secret=True, has_tls=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_secret": False}, "needs a cluster secret"),
        ({"has_tls": True}, "TLS between workers"),
        ({"is_divided": True}, "tensor-parallel-size"),
        ({"device": "cuda"}, "on the CPU only"),
    ],
)
def test_nixl_is_refused_where_strangers_or_other_processes_have_a_part_in_the_pool(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotSharedError, match=reason):
        open_transports(POOL._replace(**change), lambda *line: None)


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nixl, "import_module", Mock(side_effect=ModuleNotFoundError("No module named 'nixl'"))
    )
    with pytest.raises(NotSharedError, match=r"pip install -e '\.\[nixl\]'"):
        open_transports(POOL, lambda *line: None)


async def test_a_peer_that_offers_no_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu12", reason="the extra 'nixl' is not installed")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    transports = NixlPools("reader")
    with pytest.raises(NotSharedError, match="does not offer"):
        await transports.choose(pb.SharedPool(epoch="holder"))
    transports.close()


async def test_blocks_are_read_and_written_in_threads_that_only_nixl_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu12", reason="the extra 'nixl' is not installed")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    threads: list[str] = []
    async with running_pair(tmp_path, "nixl", "nixl") as pair:
        pair.sink.before_write = lambda index: threads.append(threading.current_thread().name)
        async with pair.push(2) as push:
            await push.send(pair.pool.prompt(0, 2))
            await push.commit(42)
    assert [name.startswith("nixl") for name in threads] == [True, True]


@pytest.mark.slow
def test_a_worker_without_nixl_does_not_import_it() -> None:
    code = (
        "import sys, quire.services.worker.main, quire.services.worker.config as config\n"
        "config.WorkerConfig(role='decode')\n"
        "assert not [name for name in sys.modules if 'nixl' in name]\n"
    )
    with closing(Forked(code)) as process:
        assert process.wait(60) == 0
