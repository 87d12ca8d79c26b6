"""How many blocks a worker allocates by default: the device here has a size and no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.device import GPU_KV_SHARE
from quire.engine.model_loader import LoadedModel
from quire.engine.pool_memory import allocate_pool
from quire.services.worker.config import WorkerConfig

META = torch.device("meta")
TOTAL, FREE, RESERVED = 80 << 30, 76 << 30, 3 << 30


def model(num_layers: int) -> LoadedModel:
    return LoadedModel(
        module=torch.nn.Module(),
        folder=Path(),
        digest="",
        dtype=torch.bfloat16,
        num_layers=num_layers,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        vocab_size=320,
        eos_token_ids=frozenset(),
        windows=(None,) * num_layers,
    )


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: RESERVED)


def blocks(num_sharing: int = 1, draft: LoadedModel | None = None, num_blocks: int | None = None) -> int:
    config = WorkerConfig(role="decode", num_sharing_gpu=num_sharing, num_blocks=num_blocks)
    return allocate_pool(config, model(32), draft, META, num_sharing).num_blocks


def test_one_worker_takes_its_share_of_what_is_free() -> None:
    assert blocks() == int(FREE * GPU_KV_SHARE) // (2 << 20)


def test_workers_that_start_together_leave_each_other_room() -> None:
    assert blocks(num_sharing=2) == int((TOTAL // 2 - RESERVED) * GPU_KV_SHARE) // (2 << 20)


def test_the_draft_model_has_room_for_as_many_blocks() -> None:
    assert blocks(draft=model(16)) == int(FREE * GPU_KV_SHARE) // (3 << 20)


def test_what_is_asked_for_is_taken() -> None:
    assert blocks(num_sharing=2, draft=model(16), num_blocks=1000) == 1000
