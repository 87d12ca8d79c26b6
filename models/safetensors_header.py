"""Reads the header of a safetensors file: the types, shapes and places of its tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from quire.models.file_checks import ModelFileError, damaged

_LENGTH_BYTES = 8
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of a number of each type."""


class StoredTensor(NamedTuple):
    """How a tensor is stored."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte after the header."""
    end: int


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return a file's tensors by their names; this reads only the header.

    Raises:
        ModelFileError: the file is missing, truncated or damaged; the message names the tensor.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            first = _LENGTH_BYTES + length
            if num_bytes < max(first, _LENGTH_BYTES + 1):
                raise damaged(path, f"ends in its header: it has {num_bytes} bytes")
            header = json.loads(file.read(length))
    except ValueError as error:
        raise damaged(path, f"has a header that is not valid JSON ({error})") from error
    except ModelFileError:
        raise
    except OSError as error:
        raise damaged(path, f"cannot be read ({error.strerror})") from error
    if not isinstance(header, dict):
        raise damaged(path, f"has a header that is not a JSON object but a {type(header).__name__}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, described) for name, described in header.items()}
    _check_places(path, tensors, num_bytes - first)
    return tensors


def _tensor(path: Path, name: str, described: Any) -> StoredTensor:
    try:
        start, end = map(int, described["data_offsets"])
        shape = tuple(map(int, described["shape"]))
        tensor = StoredTensor(str(described["dtype"]), shape, start, end)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"has a tensor {name} without dtype, shape and data_offsets") from error
    if tensor.dtype not in _BITS:
        raise damaged(path, f"has a tensor {name} of the unknown type {tensor.dtype}")
    expected = prod(shape) * _BITS[tensor.dtype]
    if min(shape, default=0) < 0 or (end - start) * 8 != expected:
        what = f"shape {list(shape)} in {tensor.dtype}"
        raise damaged(path, f"has a tensor {name} whose {end - start} bytes do not fit its {what}")
    return tensor


def _check_places(path: Path, tensors: dict[str, StoredTensor], num_bytes: int) -> None:
    """Check that the tensors are the whole file: each begins where the one before it ends."""
    position, last = 0, "its header"
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.end > num_bytes:
            have = f"{num_bytes} bytes of {tensor.end}"
            raise damaged(path, f"ends in tensor {name}: after its header it has {have}")
        if tensor.start != position:
            where = f"byte {tensor.start} of the data, and not at {position}, where {last} ends"
            raise damaged(path, f"has a tensor {name} that begins at {where}")
        position, last = tensor.end, f"tensor {name}"
    if position != num_bytes:
        raise damaged(path, f"has {num_bytes - position} bytes after the end of {last}")
