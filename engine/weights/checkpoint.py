"""Reads the tensors of a checkpoint by the names of the plain model; quantized ones are dequantized."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from safetensors import safe_open

from quire.engine.model.check import UnsupportedModelError
from quire.engine.weights.dequantize import WrongPartError, dequantize, read_codes
from quire.engine.weights.packed_codes import pack, pack_mxfp4, stand_in, take_part, weight_bytes
from quire.engine.weights.quantization import read_quantization
from quire.kernels.cpu.products.packed_weight import PackedWeight
from quire.models.file_checks import ModelFileError, damaged, read_object
from quire.models.gguf_folder import GGUF_NAME
from quire.models.model_files import read_weight_files
from quire.models.safetensors_header import StoredTensor

if TYPE_CHECKING:
    from quire.engine.weights.gguf_checkpoint import GgufCheckpoint

logger = logging.getLogger(__name__)
Decoded = TypeVar("Decoded")

_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Safetensors' names of the types of weights that are not quantized."""
_PLAIN = {*_FLOATS, "I64", "BOOL"}
"""Those of any tensors that are not quantized."""


class _Layout(NamedTuple):
    """Which stored tensors make up a quantized one, by the endings of their names."""

    weight: str
    types: tuple[str, ...]
    """Safetensors' names of the types that the weight may have."""
    plain: str
    """Ending of the plain tensor's name, in the place of ``weight``."""
    scales: tuple[str, ...]
    """Endings that the scales may have."""
    others: Mapping[str, str] = MappingProxyType({})
    """Endings of other parts, by their roles."""
    required: tuple[str, ...] = ()
    """Those of ``others`` that must exist."""


_FP8, _GPTQ = ("F8_E4M3",), (".qweight", ("I32",), ".weight", (".scales",))
_LAYOUTS = {
    "gptq": [_Layout(*_GPTQ, {"zeros": ".qzeros", "groups": ".g_idx"}, ("zeros",))],
    "awq": [_Layout(*_GPTQ, {"zeros": ".qzeros"}, ("zeros",))],
    "compressed-tensors": [
        _Layout(
            "_packed",
            ("I32",),
            "",
            ("_scale",),
            {"shape": "_shape", "zeros": "_zero_point", "groups": "_g_idx"},
            ("shape",),
        ),
        _Layout("", (*_FP8, "I8"), "", ("_scale",), {"zeros": "_zero_point"}),
    ],
    "fp8": [_Layout("", _FP8, "", ("_scale_inv", "_scale"))],
    "fbgemm_fp8": [_Layout("", _FP8, "", ("_scale",))],
    "mxfp4": [_Layout("_blocks", ("U8",), "", ("_scales",))],
}


def open_checkpoint(folder: Path) -> Checkpoint | GgufCheckpoint:
    """Return the tensors of a model's folder, which are those of a GGUF file or of safetensors."""
    if (folder / GGUF_NAME).exists():
        # Only the extra "gguf" installs what it needs.
        from quire.engine.weights.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(folder)
    return Checkpoint(folder)


class Checkpoint:
    """The tensors of a folder's safetensors, by the names of the model's parameters.

    Raises:
        UnsupportedModelError: the checkpoint is quantized in a way that quire does not read.
        ModelFileError: a quantized tensor has no scale, or a tensor cannot be told from its name and type.
    """

    def __init__(self, folder: Path) -> None:
        self.quantization = read_quantization(read_object(folder / "config.json"))
        self.error: ModelFileError | None = None
        """First error of a read, for callers that see it only through transformers."""
        self.packed: dict[str, list[PackedWeight]] = {}
        """The weights that ``read_packed`` kept packed: one, or one for each expert."""
        self._files: list[Any] = []
        self._owners: dict[str, tuple[Path, Any]] = {}
        self._headers: dict[str, StoredTensor] = {}
        for path, tensors in read_weight_files(folder).items():
            file = safe_open(path, framework="pt")
            self._files.append(file)
            self._owners |= dict.fromkeys(tensors, (path, file))
            self._headers |= tensors
        self._parts: dict[str, dict[str, str]] = {}
        """The stored tensors of each quantized one: the parts' names by their roles."""
        self._find_parts()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._owners.clear()
        self._files.clear()

    @property
    def is_plain(self) -> bool:
        """Whether transformers can load the tensors as they are stored."""
        return self.quantization is None

    @property
    def names(self) -> set[str]:
        used = {part for parts in self._parts.values() for part in parts.values()}
        return set(self._parts) | (set(self._owners) - used)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of one of the weights that are not quantized."""
        weights = (name for name in self.names - set(self._parts) if self._type(name) in _FLOATS)
        dtype: torch.dtype = self._load(min(weights)).dtype
        return dtype

    def read(self, name: str, part: tuple[int, slice] | None) -> torch.Tensor:
        """Return a tensor, or a part of it along one dimension; quantized ones are float32.

        Raises:
            ModelFileError: a part of a quantized tensor has the wrong type or shape.
        """
        if name in self._parts:
            # The product of a value and its scale is rounded once.
            return take_part(self._decoded(name, dequantize), part)
        return self._load(name) if part is None else take_part(self._owners[name][1].get_slice(name), part)

    def read_packed(self, name: str, part: tuple[int, slice] | None, dtype: torch.dtype) -> torch.Tensor:
        """Return what ``read`` does, or keep the weight packed and return a tensor that stands for it.

        Args:
            dtype: the model's dtype.
        """
        if name not in self._parts or self.quantization is None:
            return self.read(name, part)
        if self.quantization.method == "mxfp4":
            own = slice(None) if part is None else part[1]
            experts = self._decoded(name, lambda _, parts: pack_mxfp4(parts, own, dtype))
            self.packed[name] = experts
            return stand_in((len(experts), experts[0].in_features, experts[0].out_features), dtype)
        codes = self._decoded(name, read_codes)
        packed = pack(codes, part, dtype, self.quantization.rounds_inputs)
        if packed is None:
            return self.read(name, part)
        self.packed[name] = [packed]
        return stand_in((packed.out_features, packed.in_features), dtype)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the shapes of tensors that are neither quantized nor stored under other names.

        Raises:
            ModelFileError: a tensor has another one.
        """
        for name in shapes.keys() & self._headers.keys() - self._parts:
            if (stored := self._headers[name].shape) != shapes[name]:
                raise self._wrong(name, f"has the shape {list(stored)} instead of {list(shapes[name])}")

    def stored_parts(self, name: str) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a quantized one by their roles."""
        return {role: self._load(part) for role, part in self._parts[name].items()}

    def is_bias_of_zeros(self, name: str) -> bool:
        """Return whether this is a bias that GPTQ writes for layers without one."""
        weight = f"{name.removesuffix('.bias')}.weight"
        return name.endswith(".bias") and weight in self._parts and not self._load(name).any()

    def log_memory(self, module: torch.nn.Module) -> None:
        """Log the format of a quantized checkpoint, and the memory that the weights of a model take."""
        if self.quantization is not None:
            logger.info(
                "%d tensors of %s run packed and %d dequantized: the weights take %.1f MiB",
                len(self.packed),
                self.quantization,
                len(self._parts) - len(self.packed),
                weight_bytes(module, self.packed) / 2**20,
            )

    def _load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._owners[name][1].get_tensor(name)
        return tensor

    def _type(self, name: str) -> str:
        return self._headers[name].dtype

    def _wrong(self, name: str, problem: str) -> ModelFileError:
        return damaged(self._owners[name][0], f"has a tensor {name} that {problem}")

    def _find_parts(self) -> None:
        if self.quantization is None:
            for name in self._owners:
                if name.endswith((".qweight", ".weight_packed")):
                    raise UnsupportedModelError(
                        f"{name} is a quantized weight, but config.json has no quantization_config"
                    )
                kind = self._type(name)
                # The names of experts may have no ending.
                if kind.startswith("F8") or (name.endswith(".weight") and kind not in _FLOATS):
                    raise self._wrong(name, f"is {kind}, but config.json has no quantization_config")
            return
        layouts = _LAYOUTS[self.quantization.method]
        endings = tuple(end for each in layouts for end in (*each.scales, *each.others.values()))
        for name in (name for name in self._owners if not name.endswith(endings)):
            for layout in layouts:
                is_type = self._type(name) in layout.types
                if name.endswith(layout.weight) and (is_type or layout.weight):
                    if not is_type:
                        raise self._wrong(name, f"is {self._type(name)} instead of {layout.types[0]}")
                    base = name.removesuffix(layout.weight)
                    self._parts[base + layout.plain] = {
                        "weight": name,
                        **self._other_parts(base, name, layout),
                    }
                    break
        for name in self.names - self._parts.keys():
            if self._type(name) not in _PLAIN:
                raise self._wrong(
                    name, f"is {self._type(name)}, which is not expected with {self.quantization}"
                )

    def _other_parts(self, base: str, name: str, layout: _Layout) -> dict[str, str]:
        assert self.quantization is not None
        scales = [base + end for end in layout.scales if base + end in self._owners]
        if not scales:
            raise self._wrong(name, f"has no scale {' or '.join(base + end for end in layout.scales)}")
        others = {role: base + end for role, end in layout.others.items()}
        for role in (*layout.required, *(["groups"] if self.quantization.is_ordered else [])):
            if others[role] not in self._owners:
                raise self._wrong(name, f"has no {others[role]}")
        return {"scales": scales[0], **{role: part for role, part in others.items() if part in self._owners}}

    def _decoded(self, name: str, decode: Callable[..., Decoded]) -> Decoded:
        """Return what ``decode`` makes of the stored tensors of a quantized one."""
        if self.error is not None:
            raise self.error
        try:
            return decode(self.quantization, self.stored_parts(name))
        except WrongPartError as error:
            self.error = self._wrong(self._parts[name][error.role], str(error))
            raise self.error from error
