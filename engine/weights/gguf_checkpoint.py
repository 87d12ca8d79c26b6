"""Reads the tensors of a GGUF file by the names of the model's parameters: packed, or dequantized."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from quire.engine.weights.gguf_codes import read_group_codes
from quire.engine.weights.packed_codes import stand_in, take_part, weight_bytes
from quire.kernels.cpu.products.group_weight import GroupWeight, pack_groups
from quire.kernels.cpu.products.packed_weight import PackedWeight
from quire.models.file_checks import ModelFileError, damaged
from quire.models.gguf_folder import GGUF_NAME
from quire.models.gguf_header import read_header

logger = logging.getLogger(__name__)

_UNUSED = {"rope_freqs.weight"}
"""Tensors that the configuration says already."""


class GgufCheckpoint:
    """The tensors of a GGUF file, by the names of the model's parameters.

    Raises:
        ModelFileError: the tensors of the file are not those of the model.
    """

    is_plain = False
    error: ModelFileError | None = None

    def __init__(self, folder: Path) -> None:
        self.packed: dict[str, list[PackedWeight]] = {}
        """The weights that ``read_packed`` kept packed, each in its own list."""
        self._path = (folder / GGUF_NAME).resolve()
        self._header = read_header(self._path)
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        processor = TENSOR_PROCESSORS.get(self._header.architecture, TensorProcessor)
        self._processor = processor(config=config.to_dict())
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._parts: dict[str, list[str]] = {}
        """The names in the file of each parameter's parts."""
        for part in self._header.tensors.keys() - _UNUSED:
            name = self._names.get(part) or self._names.get(part.removesuffix(".weight"))
            if name is None:
                raise ModelFileError(
                    f"{self._path} has a tensor {part}, which no {config.model_type} of transformers has"
                )
            self._parts.setdefault(name, []).append(part)
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        if missing := self._shapes.keys() - self._parts.keys() - tied:
            stored = {name: part for part, name in self._names.items()}
            name = min(missing)
            raise damaged(self._path, f"has no tensor {stored.get(name, name)}")
        self._data = np.memmap(self._path, np.uint8, "r")

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        del self._data

    @property
    def names(self) -> set[str]:
        return set(self._parts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that ``read`` returns."""
        return torch.float32

    def read(self, name: str, part: tuple[int, slice] | None) -> torch.Tensor:
        """Return a tensor, or a part of it along one dimension, in float32.

        Raises:
            ModelFileError: a stored tensor has another shape than the model's.
        """
        whole = self._whole(name)
        self._check_shape(name, whole.shape)
        return take_part(whole, part)

    def read_packed(self, name: str, part: tuple[int, slice] | None, dtype: torch.dtype) -> torch.Tensor:
        """Return what ``read`` does, or keep the weight packed and return a tensor that stands for it.

        Args:
            dtype: the model's dtype.
        """
        packed = self._packed(name, part, dtype)
        if packed is not None:
            self.packed[name] = [packed]
            return stand_in((packed.out_features, packed.in_features), dtype)
        return self.read(name, part)

    def stored_parts(self, name: str) -> dict[str, torch.Tensor]:
        """Return the bytes of the parts of a packed tensor, by their names in the file and their products."""
        return {
            f"{part} {self._header.tensors[part].kind.name} by 8 bits": torch.tensor(self._content(part))
            for part in self._parts[name]
        }

    def is_bias_of_zeros(self, name: str) -> bool:
        """Return False: a file has only the tensors of its model."""
        return False

    def log_memory(self, module: torch.nn.Module) -> None:
        """Log what the file is, and the memory that the weights of the model take."""
        kinds = Counter(tensor.kind.name for tensor in self._header.tensors.values())
        logger.info(
            "%s: GGUF of %s, %.1f MiB, tensors in %s; %d run packed, with inputs in 8 bits, and others are "
            "dequantized; the weights take %.1f MiB",
            self._path,
            self._header.architecture,
            self._path.stat().st_size / 2**20,
            ", ".join(f"{kind} ({number})" for kind, number in kinds.most_common()),
            len(self.packed),
            weight_bytes(module, self.packed) / 2**20,
        )

    def _check_shape(self, name: str, shape: torch.Size) -> None:
        if shape != self._shapes[name]:
            stored, expected = self._parts[name][0], tuple(self._shapes[name])
            self.error = damaged(
                self._path, f"has a tensor {stored} of shape {tuple(shape)} instead of {expected}"
            )
            raise self.error

    def _content(self, part: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        tensor = self._header.tensors[part]
        content: np.ndarray[Any, np.dtype[np.uint8]] = self._data[
            tensor.start : tensor.start + tensor.num_bytes
        ]
        return content

    def _process(self, part: str, values: Any, together: dict[str, torch.Tensor]) -> Any:
        return self._processor.process(
            weights=values,
            name=part,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": together},
        )

    def _packed(self, name: str, part: tuple[int, slice] | None, dtype: torch.dtype) -> GroupWeight | None:
        """Return a matrix or a part of it in the codes of the file; None if no kernel multiplies these."""
        (stored, *others) = self._parts[name]
        tensor = self._header.tensors[stored]
        if others or len(tensor.shape) != 2:
            return None
        # Some architectures store rows in another order.
        places = np.arange(tensor.shape[0])[:, None]
        order = np.asarray(self._process(stored, places, {}).weights)[:, 0]
        rows = self._content(stored).reshape(tensor.shape[0], -1)[order]
        codes = read_group_codes(tensor.kind, torch.from_numpy(rows))
        if codes is None:
            return None
        self._check_shape(name, codes.codes.shape)
        return pack_groups(*codes, part, dtype)

    def _whole(self, name: str) -> torch.Tensor:
        # Parts that make up one tensor, such as the gates of experts, are put into this dictionary.
        together: dict[str, torch.Tensor] = {}
        for part in sorted(self._parts[name]):
            tensor = self._header.tensors[part]
            rows = self._content(part).reshape(*tensor.shape[:-1], -1)
            # Numpy has no bfloat16, so every tensor becomes float32, which loses nothing.
            values = gguf.dequantize(rows.view(_STORED.get(tensor.kind, np.uint8)), tensor.kind)
            done = self._process(part, values.astype(np.float32, copy=False), together)
        if name in together:
            return together[name]
        return torch.from_numpy(np.require(done.weights, requirements=["C", "W"]))


_STORED = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
"""Types of tensors that are no blocks of bytes."""
