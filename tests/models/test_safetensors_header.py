"""Damaged safetensors: one line names the file, the tensor and the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.models.file_checks import REMEDY, ModelFileError
from quire.models.model_files import check_model_files
from quire.models.safetensors_header import StoredTensor, read_safetensors

Header = dict[str, Any]
FIRST, SECOND, INDEX = "a.weight", "b.weight", "model.safetensors.index.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with two tensors of 24 and 8 bytes."""
    tensors = {FIRST: torch.ones(3, 4, dtype=torch.bfloat16), SECOND: torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path / "model.safetensors"


def parts(path: Path) -> tuple[Header, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_types_shapes_and_places_are_those_that_the_library_wrote(path: Path) -> None:
    places = {SECOND: StoredTensor("F32", (2,), 0, 8), FIRST: StoredTensor("BF16", (3, 4), 8, 32)}
    assert read_safetensors(path) == places


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda h: h[FIRST].update(shape=[3, 5]),
            f"{FIRST} whose 24 bytes do not fit its shape [3, 5] in BF16",
        ),
        (lambda h: h[FIRST].update(shape=[-3, -4]), f"{FIRST} whose 24 bytes do not fit its shape [-3, -4]"),
        (
            lambda h: h[FIRST].update(dtype="F32"),
            f"{FIRST} whose 24 bytes do not fit its shape [3, 4] in F32",
        ),
        (lambda h: h[FIRST].update(dtype="Q9"), f"a tensor {FIRST} of the unknown type Q9"),
        (lambda h: h[FIRST].pop("dtype"), f"a tensor {FIRST} without dtype, shape and data_offsets"),
        (lambda h: h[FIRST].update(shape=["three"]), f"a tensor {FIRST} without dtype, shape"),
        (lambda h: h.update({FIRST: 7}), f"a tensor {FIRST} without dtype, shape"),
        (
            lambda h: h[FIRST].update(data_offsets=[1008, 1032]),
            f"ends in tensor {FIRST}: after its header it has",
        ),
        (lambda h: h[FIRST].update(data_offsets=[7, 31]), f"{FIRST} that begins at byte 7 of the data"),
        (lambda h: h[SECOND].update(data_offsets=[-8, 0]), f"{SECOND} that begins at byte -8 of the data"),
        (lambda h: h.pop(FIRST), f"has 24 bytes after the end of tensor {SECOND}"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    path: Path, change: Callable[[Header], object], problem: str
) -> None:
    header, data = parts(path)
    change(header)
    write(path, json.dumps(header).encode(), data)
    assert_refused(path, problem)


@pytest.mark.parametrize(
    ("num_bytes", "problem"),
    [
        (-1, f"ends in tensor {FIRST}: after its header it has 31 bytes of 32"),
        (-25, f"ends in tensor {SECOND}: after its header it has 7 bytes of 8"),
        (20, "ends in its header: it has 20 bytes"),
        (4, "ends in its header: it has 4 bytes"),
    ],
)
def test_a_truncated_file_is_refused(path: Path, num_bytes: int, problem: str) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert_refused(path, problem)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{'a': 1}", "a header that is not valid JSON"),
        (b"\xff" * 20, "a header that is not valid JSON"),
        (b"[1]", "a header that is not a JSON object but a list"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(path: Path, header: bytes, problem: str) -> None:
    write(path, header, b"")
    assert_refused(path, problem)


def assert_refused(path: Path, problem: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_safetensors(path)
    message = str(caught.value)
    assert problem in message
    assert message.startswith(f"{path} ")
    assert message.endswith(REMEDY)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("shard", "problem"),
    [
        ("lost.safetensors", f"does not exist, and {INDEX} says that it has tensor c.weight"),
        ("model-1.safetensors", f"has no tensor c.weight, which {INDEX} says that it has"),
    ],
)
def test_an_index_that_names_what_does_not_exist_is_refused(path: Path, shard: str, problem: str) -> None:
    path.rename(path.with_name("model-1.safetensors"))
    path.with_name("config.json").write_text('{"model_type": "llama"}')
    places = {FIRST: "model-1.safetensors", "c.weight": shard}
    path.with_name(INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    with pytest.raises(ModelFileError, match=f"{shard} {problem}: {REMEDY}"):
        check_model_files(path.parent)
