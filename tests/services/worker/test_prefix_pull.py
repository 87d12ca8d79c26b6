"""What a pull refuses to write."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from quire.engine.engine_thread import EngineThread
from quire.engine.kv_memory import KvMemory
from quire.kvindex.kv_layout import KvShape
from quire.kvtransfer.errors import BadBlockError
from quire.kvtransfer.frame import Frame
from quire.services.worker.prefix_pull import _Arrivals

BLOCK_SIZE = 4


async def test_a_pull_takes_no_block_that_would_end_the_engine() -> None:
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "int8"), 8, torch.device("cpu"))
    arrivals = _Arrivals("pull", cast("EngineThread", None), memory, [b"hash"])
    arrivals._block_ids = [1]
    with pytest.raises(BadBlockError, match="block 0: a stored scale"):
        arrivals.write([Frame(0, b"hash", bytes(memory.shape.block_bytes))])
    assert arrivals.num_written == 0
