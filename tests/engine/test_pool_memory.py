"""How many blocks are allocated: the device here has a size and no memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.engine import pool_memory
from quire.engine.config import EngineConfig
from quire.engine.model.check import AttentionCall, KvHeads
from quire.engine.pool_memory import (
    CPU_KV_BYTES,
    GPU_KV_SHARE,
    allocate_pool,
    allocate_swap_space,
    check_memory,
)
from quire.engine.runner.control_groups import ControlGroups
from quire.engine.weights.loader import LoadedModel
from quire.services.worker.config import WorkerConfig
from quire.settings.setting import SettingError

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
        heads=KvHeads(num_layers, 8, 128, (AttentionCall(None, False, 1.0, None, None),) * num_layers),
        recipe=None,
        arithmetic="",
    )


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: RESERVED)


def blocks(num_sharing: int = 1, draft: LoadedModel | None = None, num_blocks: int | None = None) -> int:
    config = EngineConfig(num_blocks=num_blocks)
    return allocate_pool(config, model(32), draft, META, num_sharing).num_blocks


def test_one_worker_takes_its_share_of_the_free_memory() -> None:
    assert blocks() == int(FREE * GPU_KV_SHARE) // (2 << 20)


def test_workers_that_start_together_share_the_free_memory() -> None:
    assert blocks(num_sharing=2) == int((TOTAL // 2 - RESERVED) * GPU_KV_SHARE) // (2 << 20)


def test_the_draft_model_has_room_for_as_many_blocks() -> None:
    assert blocks(draft=model(16)) == int(FREE * GPU_KV_SHARE) // (3 << 20)


def test_a_requested_number_of_blocks_is_used() -> None:
    assert blocks(num_sharing=2, draft=model(16), num_blocks=1000) == 1000


def test_a_number_of_bytes_is_rounded_down_to_blocks() -> None:
    config = EngineConfig(kv_memory_bytes=(7 << 20) + 5)
    assert allocate_pool(config, model(32), None, META).num_blocks == 3  # 2 MiB each


def test_on_the_cpu_the_pool_has_a_fixed_size() -> None:
    memory = allocate_pool(EngineConfig(), model(1), None, torch.device("cpu"))
    assert memory.num_blocks == CPU_KV_BYTES // memory.shape.block_bytes


def test_a_pool_of_one_block_is_refused_with_the_setting_to_raise() -> None:
    with pytest.raises(SettingError, match="at least two blocks of 2097152 bytes: raise kv_memory_bytes"):
        allocate_pool(EngineConfig(kv_memory_bytes=3 << 20), model(32), None, META)


def test_the_swap_space_is_in_host_memory_and_may_be_absent() -> None:
    memory = allocate_pool(EngineConfig(num_blocks=2), model(1), None, META)
    swap_memory = allocate_swap_space(EngineConfig(swap_space_bytes=5 * memory.shape.block_bytes), memory)
    assert swap_memory is not None
    assert (swap_memory.num_blocks, swap_memory.device.type) == (5, "cpu")
    small = EngineConfig(swap_space_bytes=memory.shape.block_bytes - 1)
    assert allocate_swap_space(small, memory) is None


def test_a_pool_larger_than_the_machine_is_refused_with_the_settings_to_lower() -> None:
    config = EngineConfig(kv_memory_bytes=1 << 50)
    lower = "lower kv_memory_bytes, num_blocks or swap_space_bytes, or raise the container's memory limit"
    with pytest.raises(SettingError, match=rf"this process needs \d+ MiB for blocks .* in all: {lower}"):
        allocate_pool(config, model(1), None, torch.device("cpu"))


def test_a_length_beyond_the_models_is_refused() -> None:
    assert allocate_pool(EngineConfig(max_model_len=8192, num_blocks=2), model(1), None, META)
    with pytest.raises(SettingError, match="max_model_len is 8193, and the model takes at most 8192 tokens"):
        allocate_pool(EngineConfig(max_model_len=8193), model(1), None, META)


@pytest.mark.parametrize(("num_workers", "fits"), [(1, True), (2, True), (3, False)])
def test_all_workers_together_must_fit_into_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int, fits: bool
) -> None:
    (tmp_path / "memory.max").write_text(f"{512 << 20}\n")
    monkeypatch.setattr(pool_memory, "_private_bytes", lambda: 100 << 20)
    config, groups = WorkerConfig(role="decode"), ControlGroups(tmp_path, tmp_path / "own")
    if fits:
        check_memory(config, 156 << 20, num_workers, groups=groups)
        return
    message = (
        "each of 3 workers needs 156 MiB for blocks beside 100 MiB for its model, and 512 MiB are here in "
        "all: lower --kv-memory, --num-blocks, --swap-memory or --host-cache, or "
        "raise the container's memory limit"
    )
    with pytest.raises(SettingError, match=message):
        check_memory(config, 156 << 20, num_workers, groups=groups)


def test_weights_that_workers_share_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{512 << 20}\n")
    monkeypatch.setattr(pool_memory, "_private_bytes", lambda: 50 << 20)
    config, groups = WorkerConfig(role="decode"), ControlGroups(tmp_path, tmp_path / "own")
    check_memory(config, 50 << 20, 4, 112 << 20, groups)
    with pytest.raises(SettingError, match="50 MiB for its model, all share 113 MiB of weights, and 512 MiB"):
        check_memory(config, 50 << 20, 4, 113 << 20, groups)


def test_each_node_has_a_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(pool_memory, "check_memory", lambda *arguments: counted.append(arguments[3]))
    shared = replace(model(1), shared_bytes=5)
    allocate_pool(EngineConfig(num_blocks=4), shared, None, META, num_sharing=4)
    allocate_pool(EngineConfig(num_blocks=4), shared, None, META, num_sharing=4, num_copies=2)
    assert counted == [5, 10]


def test_every_rank_has_a_part_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{512 << 20}\n")
    monkeypatch.setattr(pool_memory, "_private_bytes", lambda: 200 << 20)
    groups = ControlGroups(tmp_path, tmp_path / "own")
    check_memory(EngineConfig(), 200 << 20, 1, groups=groups)
    with pytest.raises(SettingError, match="beside 400 MiB for its model"):
        check_memory(EngineConfig(tensor_parallel_size=2), 200 << 20, 1, groups=groups)


def test_all_blocks_on_the_host_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(pool_memory, "check_memory", lambda config, size, *others: counted.append(size))
    config = EngineConfig(num_blocks=4, swap_space_bytes=5)
    block = model(1).kv_shape(config.block_size).block_bytes
    allocate_pool(config, model(1), None, torch.device("cpu"), cache_bytes=7)
    allocate_pool(config, model(1), model(1), torch.device("cpu"))
    allocate_pool(config, model(1), None, META)
    assert counted == [4 * block + 12, 8 * block + 5, 5]


def test_weights_are_the_memory_of_their_process() -> None:
    before = pool_memory._private_bytes()
    weights = torch.ones(64 << 20, dtype=torch.uint8)
    assert 60 << 20 <= pool_memory._private_bytes() - before <= 80 << 20
    del weights
