"""The name of a worker's arithmetic: equal where the bits are, and another one where they may not be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire.engine.model import arithmetic
from quire.engine.model.arithmetic import SUMS, Sums, arithmetic_name, choose_sums
from quire.engine.weights import loader, whole_model
from tests.engine.other_processor import results

Pins = dict[tuple[str, str, str], str]
PINS: dict[str, Pins] = {
    "float32-1": {
        ("gemma2", "float32", "auto"): "33837357bc2f9d49",
        ("gemma2", "bfloat16", "auto"): "72210f99431046e1",
        ("llama", "float16", "auto"): "1d4cf45946a226e7",
        ("llama", "float32", "int8"): "adf640c2713b482a",
        ("llama", "float32", "int4"): "b34e5863233a47fb",
        ("llama", "bfloat16", "w8a8"): "94aaf5354499b50f",
        ("llama", "float32", "w4a8"): "47bb6f4e6b03083c",
    },
    "float32-2": {
        ("gemma2", "float32", "auto"): "398fa6ed76ad2e40",
        ("gemma2", "bfloat16", "auto"): "d253e93d1ac8e558",
        ("llama", "float16", "auto"): "fc92f1f44833eae7",
        ("llama", "float32", "int8"): "e17951280f72906b",
        ("llama", "float32", "int4"): "1bd124d81c59782c",
        ("llama", "bfloat16", "w8a8"): "ac6f410467e7ef97",
        ("llama", "float32", "w4a8"): "c033645869bb53d5",
    },
    "amx-bf16-1": {
        ("gemma2", "bfloat16", "auto"): "7dbe0ca83cff56c6",
        ("llama", "bfloat16", "auto"): "7afe70d56c720a84",
    },
    "amx-bf16-2": {
        ("gemma2", "bfloat16", "auto"): "d253e93d1ac8e558",
        ("llama", "bfloat16", "auto"): "a1bff7f32070beb9",
    },
    "amx-bf16-3": {
        ("gemma2", "bfloat16", "auto"): "d253e93d1ac8e558",
        ("llama", "bfloat16", "auto"): "a1bff7f32070beb9",
        ("youtu", "bfloat16", "auto"): "41ca925ff560e922",
    },
}
"""For each name of sums: digests of what requests get, by architecture, dtype and weights."""
FAST = Sums("fast-1", frozenset({torch.bfloat16}), frozenset({"amx-tile", "amx-bf16"}))
PORTABLE = Sums("float32-2")
HAS_AMX = {"avx2": True, "amx-tile": True, "amx-bf16": True}
CPU = torch.device("cpu")


def pin(model: Path, folder: Path) -> str:
    """Copy a model, give it weights that no library computes, and return the copy."""
    for file in model.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(model / "model.safetensors")
    for seed, name in enumerate(sorted(weights)):
        bits = np.random.Generator(np.random.PCG64(seed)).integers(-128, 128, weights[name].shape)
        weights[name] = torch.from_numpy(bits / (1024.0 if weights[name].dim() > 1 else 512.0)).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("sums", "architecture", "dtype", "weight_dtype"),
    [(sums, *case) for sums in SUMS for case in PINS[sums.name]],
    ids=str,
)
def test_kernels_compute_the_bits_of_their_name(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sums: Sums,
    architecture: str,
    dtype: str,
    weight_dtype: str,
) -> None:
    """Processors without the instructions of a name compute its bits in another way."""
    for module in (loader, whole_model):
        monkeypatch.setattr(module, "choose_sums", lambda *_: sums)
    case = architecture, dtype, weight_dtype
    pin(tiny_model(architecture), tmp_path)
    answers = results(tmp_path, dtype, weight_dtype)
    found = hashlib.sha256(json.dumps([answers["tokens"], answers["prompt"]]).encode()).hexdigest()[:16]
    name = answers["arithmetic"]
    assert name == sums.name
    assert found == PINS[name][case], (
        f"the kernels compute other bits than those of {name}. If that is intended, old and new workers must "
        "not share blocks: raise the number of the name in engine/model/arithmetic.py, append a dictionary "
        f"with the new digests to PINS ({found!r} for {case}), and say in the changelog that the arithmetic "
        "has changed. Never change the digests of a name."
    )


def test_each_name_has_its_own_digests() -> None:
    assert {each.name for each in SUMS} <= PINS.keys(), "append the digests of the new name to PINS"
    assert all(before != after for before, after in pairwise(PINS.values()))


@pytest.mark.parametrize(
    ("setting", "dtype", "features", "expected"),
    [
        ("auto", torch.bfloat16, HAS_AMX, FAST),
        ("auto", torch.float32, HAS_AMX, PORTABLE),
        ("auto", torch.bfloat16, {**HAS_AMX, "amx-tile": False}, PORTABLE),
        ("auto", torch.bfloat16, {"avx2": True}, PORTABLE),
        ("portable", torch.bfloat16, HAS_AMX, PORTABLE),
    ],
)
def test_the_fastest_sums_of_a_machine_are_chosen_unless_they_must_be_portable(
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    dtype: torch.dtype,
    features: dict[str, bool],
    expected: Sums,
) -> None:
    monkeypatch.setattr(arithmetic, "SUMS", (FAST, PORTABLE))
    assert choose_sums(setting, dtype, features) == expected


def test_every_machine_can_make_the_portable_sums() -> None:
    assert choose_sums("portable", torch.float16, {}) == choose_sums("auto", torch.float16, {}) == SUMS[-1]


def test_only_where_torch_computes_the_name_has_the_versions_of_libraries_and_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = set()
    for version, of_modules, capability, on_gpu in (
        ("2.12.1+cpu", "5.17.0", "AVX2", (8, 0)),
        ("2.12.1+cpu", "5.17.0", "AVX512", (9, 0)),
        ("2.13.0+cpu", "5.17.0", "AVX512", (8, 9)),
        ("2.13.0+cpu", "5.23.0", "AVX512", (8, 9)),
    ):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(transformers, "__version__", of_modules)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda it=capability: it)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=on_gpu: it)
        assert arithmetic_name(PORTABLE, CPU, is_compiled=True) == "float32-2"
        names.add(arithmetic_name(PORTABLE, CPU, is_compiled=False))
        names.add(arithmetic_name(FAST, CPU, is_compiled=False))
        names.add(arithmetic_name(PORTABLE, torch.device("cuda"), is_compiled=False))
    assert len(names) == 12
    assert {
        "float32-2/torch-2.12.1+cpu/transformers-5.17.0/AVX2",
        "triton-1/torch-2.13.0+cpu/transformers-5.23.0/sm_89",
    } < names
