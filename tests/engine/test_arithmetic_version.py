"""A change of the bits that kernels compute needs a new version, so that workers do not mix their blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kvindex.kv_layout import ARITHMETIC_VERSION
from tests.engine.other_processor import results

Pins = dict[tuple[str, str, str], str]
PINS: list[Pins] = [
    {
        ("gemma2", "float32", "auto"): "33837357bc2f9d49",
        ("gemma2", "bfloat16", "auto"): "72210f99431046e1",
        ("llama", "float16", "auto"): "1d4cf45946a226e7",
        ("llama", "float32", "int8"): "adf640c2713b482a",
        ("llama", "float32", "int4"): "81b5322b1a05d219",
    },
]
"""For each version of the arithmetic: digests of what requests get, by architecture, dtype and weights."""


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


@pytest.mark.parametrize("case", list(PINS[-1]), ids="-".join)
def test_kernels_compute_the_bits_of_their_version(
    tiny_model: Callable[[str], Path], tmp_path: Path, case: tuple[str, str, str]
) -> None:
    architecture, dtype, weight_dtype = case
    pin(tiny_model(architecture), tmp_path)
    answers = results(tmp_path, dtype, weight_dtype)
    found = hashlib.sha256(json.dumps([answers["tokens"], answers["prompt"]]).encode()).hexdigest()[:16]
    assert found == PINS[-1][case], (
        f"the kernels compute other bits than those of arithmetic version {ARITHMETIC_VERSION}. If that is "
        "intended, workers of the two versions must not share blocks: raise ARITHMETIC_VERSION in "
        f"kvindex/kv_layout.py, append a dictionary with the new digests to PINS ({found!r} for {case}), and "
        "say in the changelog that the arithmetic has changed. Never change the digests of a version."
    )


def test_each_version_has_its_own_digests() -> None:
    assert len(PINS) == ARITHMETIC_VERSION, "append the digests of the new version to PINS"
    assert all(before != after for before, after in pairwise(PINS))
