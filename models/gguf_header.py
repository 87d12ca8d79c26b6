"""Reads the header of a GGUF file: its settings and the places of its tensors."""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire.models.file_checks import ModelFileError, damaged

TYPES = frozenset(
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
"""Names of the types of tensors that quire reads."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_ALIGNMENT = 32


class GgufTensor(NamedTuple):
    """Where a tensor lies in the file, and how it is stored."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """In the order of torch, [outputs, inputs]."""
    start: int
    """First byte in the file."""
    num_bytes: int


class GgufHeader(NamedTuple):
    """The settings of a GGUF file by their keys, and its tensors by their names."""

    settings: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.settings["general.architecture"])


def read_header(path: Path) -> GgufHeader:
    """Read a header and check that the file has every byte of each tensor.

    Raises:
        ModelFileError: the file is damaged, truncated or a part of several, or has a tensor of a type that
            quire does not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            reader = _Reader(content)
            settings, places = _read(path, reader)
            alignment = settings.get("general.alignment", _ALIGNMENT)
            first = -(-reader.position // alignment) * alignment
            tensors = {name: _tensor(path, name, place, first) for name, place in places.items()}
            for name, tensor in tensors.items():
                if (end := tensor.start + tensor.num_bytes) > len(content):
                    raise damaged(path, f"ends in tensor {name}: it has {len(content)} bytes of {end}")
    except (struct.error, UnicodeDecodeError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise damaged(path, f"has a damaged header ({error})") from error
    if settings.get("split.count", 0) > 1:
        raise ModelFileError(
            f"{path} is a part of a split file: merge all parts with llama-gguf-split --merge"
        )
    return GgufHeader(settings, tensors)


class _Reader:
    """Reads values one after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.position = content, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        values = struct.unpack_from(form, self._content, self.position)
        self.position += struct.calcsize(form)
        return values

    def string(self) -> str:
        [length] = self.numbers("Q")
        if length > len(self._content) - self.position:
            raise ValueError(f"a text of {length} bytes goes beyond the end of the file")
        self.position += length
        return self._content[self.position - length : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _FLOAT32:
            # Returns 1e-06 for the nearest float32, as the writer's configuration had it.
            return float(f"{self.numbers('f')[0]:.7g}")
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        item, length = self.numbers("IQ")
        if item in _SCALARS:
            return list(self.numbers(f"{length}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(length)]


def _read(path: Path, reader: _Reader) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the settings, and of each tensor the sizes, innermost first, type and place in the data."""
    magic, version, num_tensors, num_settings = reader.numbers("4sIQQ")
    if magic != b"GGUF":
        raise damaged(path, "is not a GGUF file")
    if version not in (2, 3):
        raise ModelFileError(
            f"{path} has version {version} of GGUF or another byte order: quire reads 2 and 3"
        )
    settings = {}
    for _ in range(num_settings):
        key = reader.string()
        settings[key] = reader.value(*reader.numbers("I"))
    places = {}
    for _ in range(num_tensors):
        name = reader.string()
        [num_sizes] = reader.numbers("I")
        places[name] = (reader.numbers(f"{num_sizes}Q"), *reader.numbers("IQ"))
    return settings, places


def _tensor(path: Path, name: str, place: tuple[Any, ...], first: int) -> GgufTensor:
    sizes, number, offset = place
    known = {kind.value for kind in GGMLQuantizationType}
    type_name = GGMLQuantizationType(number).name if number in known else f"type {number}"
    if type_name not in TYPES:
        raise ModelFileError(
            f"{path} has a tensor {name} in {type_name}: quire reads {', '.join(sorted(TYPES))}"
        )
    kind = GGMLQuantizationType(number)
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if not sizes or sizes[0] % per_block:
        raise damaged(path, f"has a tensor {name} of sizes {sizes}, which are no blocks of {per_block}")
    return GgufTensor(kind, sizes[::-1], first + offset, prod(sizes) // per_block * block_bytes)
