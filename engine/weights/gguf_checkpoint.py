"""Reads the tensors of a GGUF file by the names of the model's parameters, and dequantizes them."""

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

from quire.engine.weights.lazy_tensor import LazyTensor
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
        if whole.shape != self._shapes[name]:
            stored, shape = self._parts[name][0], tuple(whole.shape)
            self.error = damaged(
                self._path, f"has a tensor {stored} of shape {shape} instead of {tuple(self._shapes[name])}"
            )
            raise self.error
        if part is None:
            return whole
        dimension, indices = part
        return whole[indices] if dimension == 0 else whole[:, indices]

    def is_bias_of_zeros(self, name: str) -> bool:
        """Return False: a file has only the tensors of its model."""
        return False

    def lazy_tensors(self) -> dict[str, LazyTensor]:
        """Return all tensors, each of which is read when it is indexed."""
        return {name: LazyTensor(self.read, name) for name in self._parts}

    def log_memory(self, module: torch.nn.Module) -> None:
        """Log what the file is, and the memory that the weights of the model take."""
        kinds = Counter(tensor.kind.name for tensor in self._header.tensors.values())
        logger.info(
            "dequantized %s: GGUF of %s, %.1f MiB, tensors in %s; the weights take %.1f MiB",
            self._path,
            self._header.architecture,
            self._path.stat().st_size / 2**20,
            ", ".join(f"{kind} ({number})" for kind, number in kinds.most_common()),
            sum(parameter.nbytes for parameter in module.parameters()) / 2**20,
        )

    def _whole(self, name: str) -> torch.Tensor:
        # Parts that make up one tensor, such as the gates of experts, are put into this dictionary.
        together: dict[str, torch.Tensor] = {}
        for part in sorted(self._parts[name]):
            tensor = self._header.tensors[part]
            content = self._data[tensor.start : tensor.start + tensor.num_bytes]
            rows = content.reshape(*tensor.shape[:-1], -1)
            # Numpy has no bfloat16, so every tensor becomes float32, which loses nothing.
            values = gguf.dequantize(rows.view(_STORED.get(tensor.kind, np.uint8)), tensor.kind)
            done: Any = self._processor.process(
                weights=values.astype(np.float32, copy=False),
                name=part,
                tensor_key_mapping=self._names,
                parsed_parameters={"tensors": together},
            )
        if name in together:
            return together[name]
        return torch.from_numpy(np.require(done.weights, requirements=["C", "W"]))


_STORED = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
"""Types of tensors that are no blocks of bytes."""
