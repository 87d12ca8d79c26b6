"""Every file of a model, missing or damaged in any way: one sentence names the file and the remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from quire.models.file_checks import ModelFileError
from quire.models.model_files import check_model_files
from quire.models.source import demo_model_path
from quire.protos import worker_pb2
from quire.rpc.errors import BadFileError
from quire.services.requests.served_model import load_served_model

INDEX, SHARD, TEMPLATE = "model.safetensors.index.json", "model-2.safetensors", "chat_template.jinja"
HEADER = b'{"w":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}'
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4000)


def replaced(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": replaced(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "binary": replaced(bytes(range(128, 256)) * 8),
    "a list": replaced(b"[1, 2]"),
    "numbers": replaced(b'{"model_type": 7, "weight_map": 7, "bos_token": 7}'),
    "a folder": make_a_folder,
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}
MAY_BE_MISSING = ("generation_config.json", "tokenizer_config.json", TEMPLATE)
FINE = {
    *((name, "missing") for name in MAY_BE_MISSING),
    ("generation_config.json", "numbers"),
    *((TEMPLATE, damage) for damage in ("a list", "numbers")),  # any text is a template
}
"""Damages that leave a file that can be used."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the demo model with two files of weights and their index, and a template."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_model_path() / name).read_bytes())
    (tmp_path / "model-1.safetensors").write_bytes(WEIGHTS.replace(b'"w"', b'"v"'))
    (tmp_path / SHARD).write_bytes(WEIGHTS)
    index = {"metadata": {}, "weight_map": {"v": "model-1.safetensors", "w": SHARD}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / TEMPLATE).write_text("{% for each in messages %}{{ each.content }}{% endfor %}")
    return tmp_path


def load_text(folder: Path) -> None:
    load_served_model(worker_pb2.GetWorkerInfoResponse(model="m", model_path=str(folder)))


CASES = [
    (load, name, damage)
    for load, names in (
        (check_model_files, ("config.json", "generation_config.json", INDEX, SHARD)),
        (load_text, ("tokenizer.json", "tokenizer_config.json", TEMPLATE, "generation_config.json")),
    )
    for name in names
    for damage in DAMAGES
    if (name, damage) not in FINE and (damage != "too long" or name == SHARD)
]


@pytest.mark.parametrize(
    ("load", "name", "damage"), CASES, ids=[f"{name} {damage}" for _, name, damage in CASES]
)
def test_a_damaged_file_is_reported_with_a_remedy(
    folder: Path, load: Callable[[Path], None], name: str, damage: str
) -> None:
    DAMAGES[damage](folder / name)
    with pytest.raises((ModelFileError, BadFileError)) as caught:
        load(folder)
    message = str(caught.value)
    assert name in message
    assert "\n" not in message
    assert "save" in message


@pytest.mark.parametrize(("name", "damage"), sorted(FINE), ids=str)
def test_files_that_can_be_used_are_used(folder: Path, name: str, damage: str) -> None:
    DAMAGES[damage](folder / name)
    check_model_files(folder)
    load_text(folder)


def test_one_file_of_weights_needs_no_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / SHARD).rename(folder / "model.safetensors")
    check_model_files(folder)


def test_an_index_without_metadata_is_refused(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": SHARD}}))
    with pytest.raises(ModelFileError, match=f"{INDEX} has no .metadata."):
        check_model_files(folder)


def test_the_demo_models_files_are_whole() -> None:
    check_model_files(demo_model_path())
