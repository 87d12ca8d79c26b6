"""Models whose weights are in a file of memory compute the same bits, and cannot change them."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from quire.engine.model.layers.latent_attention import MakeHeads, keep_latents
from quire.engine.weights import whole_model
from quire.engine.weights.loader import LoadedModel, load_model
from quire.engine.weights.shared_module import Source, load_shared
from quire.engine.weights.weights_file import WeightsFile
from quire.kernels.cpu.products.packed_weight import Allocate
from tests.testing.tiny_engine import CPU

WAIT_SECONDS = 20.0
NAME = "/memfd:quire-weights"


@pytest.fixture
def folder(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A llama's folder that a test may change."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "llama"))


def logits(model: LoadedModel) -> torch.Tensor:
    model.module.config._attn_implementation = "eager"
    with torch.inference_mode():
        output: torch.Tensor = model.module(input_ids=torch.arange(5, 45)[None], use_cache=False).logits
    return output


def permissions_of(address: int) -> str:
    """Return the permissions of the mapping at an address if it is one of weights."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1] if NAME in line else "private"
    raise AssertionError("nothing is mapped there")


def is_shared(model: LoadedModel) -> bool:
    """Return whether all parameters are mapped read-only; fail if only some of them are."""
    found = {permissions_of(each.data_ptr()) for each in model.module.parameters()}
    assert found in ({"r--s"}, {"private"})
    return found == {"r--s"}


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("float32", "auto"), ("bfloat16", "auto"), ("float32", "int4"), ("bfloat16", "w8a8")],
)
@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "gpt_oss", "deepseek_v3", "lfm2", "llama4", "mixtral", "qwen3_5_text"]
)
def test_shared_weights_give_the_same_bits_as_a_models_own(
    tiny_model: Callable[[str], Path], file: WeightsFile, architecture: str, dtype: str, weight_dtype: str
) -> None:
    path = str(tiny_model(architecture))
    own = load_model(path, dtype, CPU, weight_dtype)
    for _ in range(2):
        shared = load_model(path, dtype, CPU, weight_dtype, weights_file=file)
        assert is_shared(shared)
        assert shared.shared_bytes == os.fstat(file.descriptor).st_size
        assert (shared.digest, shared.arithmetic) == (own.digest, own.arithmetic)
        assert (shared.recipe is None) == (own.recipe is None)
        assert torch.equal(logits(shared), logits(own))
    assert (own.shared_bytes, is_shared(own)) == (0, False)


def test_the_packed_weights_are_in_the_file_and_buffers_are_not(folder: Path, file: WeightsFile) -> None:
    model = load_model(str(folder), "float32", CPU, weights_file=file)
    assert model.recipe is not None
    linears = [model.recipe.head, *(each.output for each in model.recipe.attentions)]
    assert {permissions_of(each.packed.panels.data_ptr()) for each in linears} == {"r--s"}
    assert {permissions_of(each.data_ptr()) for each in model.module.buffers()} == {"private"}


def test_a_model_is_made_of_the_file_when_its_weights_are_gone(folder: Path, file: WeightsFile) -> None:
    first = load_model(str(folder), "float32", CPU, weights_file=file)
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(load_model(str(folder), "float32", CPU, weights_file=file)), logits(first))
    with pytest.raises(OSError, match=r"has no \*.safetensors"):
        load_model(str(folder), "float32", CPU)


def test_other_settings_or_files_share_nothing(
    folder: Path, file: WeightsFile, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(str(folder), "float32", CPU, weights_file=file)
    for dtype, weight_dtype, arithmetic in (
        ("bfloat16", "auto", "auto"),
        ("float32", "int4", "auto"),
        ("float32", "auto", "portable"),
    ):
        model = load_model(str(folder), dtype, CPU, weight_dtype, arithmetic, weights_file=file)
        assert not is_shared(model)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    with caplog.at_level(logging.WARNING):
        assert not is_shared(load_model(str(folder), "float32", CPU, weights_file=file))
    assert "has weights of its own: its model or settings changed" in caplog.text


# Python restores filters of warnings for all threads together.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_workers_that_start_together_load_once(file: WeightsFile) -> None:
    source, weight, loads = Source(("settings",), {}), torch.arange(6.0).view(2, 3), Barrier(2)

    def load(_: Allocate) -> torch.nn.Linear:
        loads.wait(WAIT_SECONDS)
        layer = torch.nn.Linear(3, 2, bias=False)
        layer.weight.data.copy_(weight)
        return layer

    def start() -> torch.Tensor:
        layer, num_bytes = load_shared(file, source, lambda layer: layer, load)
        assert num_bytes
        return layer.weight.detach()

    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(start) for _ in range(3)]
        # A second load would find nobody at the barrier.
        loads.wait(WAIT_SECONDS)
        assert all(torch.equal(each.result(WAIT_SECONDS), weight) for each in starts)


def test_weights_of_a_worker_that_died_while_it_wrote_them_are_not_used(
    folder: Path, file: WeightsFile
) -> None:
    os.write(file.descriptor, b"half a model" * 1000)
    own = load_model(str(folder), "float32", CPU)
    for _ in range(2):
        assert torch.equal(logits(load_model(str(folder), "float32", CPU, weights_file=file)), logits(own))


def test_a_worker_that_may_not_write_so_large_a_file_has_weights_of_its_own(
    folder: Path, file: WeightsFile, caplog: pytest.LogCaptureFixture
) -> None:
    own = load_model(str(folder), "float32", CPU)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        model = load_model(str(folder), "float32", CPU, weights_file=file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (model.shared_bytes, is_shared(model), file.num_bytes) == (0, False, 0)
    assert "has weights of its own: they cannot be shared: [Errno 27] File too large" in caplog.text
    assert torch.equal(logits(model), logits(own))
    assert is_shared(load_model(str(folder), "float32", CPU, weights_file=file))


def test_a_worker_whose_file_the_system_does_not_seal_has_weights_of_its_own(
    folder: Path, file: WeightsFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: WeightsFile) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    own = load_model(str(folder), "float32", CPU)
    monkeypatch.setattr(WeightsFile, "seal", refuse)
    model = load_model(str(folder), "float32", CPU, weights_file=file)
    assert (model.shared_bytes, is_shared(model), file.num_bytes) == (0, False, 0)
    assert "they cannot be shared: [Errno 1] Operation not permitted" in caplog.text
    assert torch.equal(logits(model), logits(own))


def test_a_model_that_cannot_be_pickled_has_weights_of_its_own(
    folder: Path, file: WeightsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = load_model(str(folder), "float32", CPU)

    def add_lambda(model: torch.nn.Module, make_heads: MakeHeads) -> None:
        keep_latents(model, make_heads)
        model.own = lambda: None  # type: ignore[assignment]

    monkeypatch.setattr(whole_model, "keep_latents", add_lambda)
    model = load_model(str(folder), "float32", CPU, weights_file=file)
    assert not is_shared(model)
    assert not file.is_complete
    assert torch.equal(logits(model), logits(own))
