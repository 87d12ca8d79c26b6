"""Loads the modules of a whole model by transformers, and packs their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.engine.model.arithmetic import choose_sums
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers import own_attention
from quire.engine.model.layers.experts import pack_experts, packable_experts
from quire.engine.model.layers.latent_attention import GpuHeadLinear, HeadLinear, keep_latents
from quire.engine.model.layers.packed_linear import pack_linear_layers, packable_weights
from quire.engine.weights.checkpoint import Checkpoint
from quire.kernels.cpu.products.packed_weight import Allocate, PackedWeight, in_own_memory
from quire.models.file_checks import damaged
from quire.models.model_files import read_weight_files
from quire.models.source import EMBEDDING_MODULES

if TYPE_CHECKING:
    from quire.engine.weights.gguf_checkpoint import GgufCheckpoint

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_module(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    checkpoint: Checkpoint | GgufCheckpoint,
    packs: bool,
) -> PreTrainedModel:
    """Load a model; if ``packs`` is true, weights that kernels multiply as they are stored stay packed."""
    # Progress bars of transformers would garble the launcher's progress bar, and it advises to install
    # kernels that only its own code would use.
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    logging.getLogger("transformers.modeling_utils").addFilter(_is_needed)
    model_class: Any = AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "use_safetensors": True}
    try:
        with torch.random.fork_rng(devices=[]):
            # Embedding models may have no output layer; all workers then have to make the same one.
            torch.manual_seed(0)
            if not checkpoint.is_plain:
                model_class, source = _dequantized_source(folder, dtype, checkpoint, packs)
            module: PreTrainedModel
            module, report = model_class.from_pretrained(
                **source,
                dtype="auto" if dtype == "auto" else DTYPES[dtype],
                attn_implementation=own_attention.implementation_at_load(config),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (ImportError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if checkpoint.error is not None:
            raise checkpoint.error from error
        raise UnsupportedModelError(
            f"transformers cannot load {folder} with paged attention: {error}"
        ) from error
    _check_report(folder, module, report)
    checkpoint.log_memory(module)
    return module


def _is_needed(record: logging.LogRecord) -> bool:
    """Return whether a record is not the table of what a checkpoint lacks, which ``_check_report`` says."""
    return "LOAD REPORT" not in record.getMessage() or "CONVERSION" in record.getMessage()


def _check_report(folder: Path, module: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Check transformers' report of a load: it fills weights that it has not found with random numbers.

    Raises:
        ModelFileError: the checkpoint lacks a weight, or has one of another shape.
    """
    for name, stored, expected in sorted(report["mismatched_keys"]):
        files = [path for path, tensors in read_weight_files(folder).items() if name in tensors]
        shapes = f"{list(stored)} instead of {list(expected)}"
        raise damaged((files or [folder])[0], f"has a tensor {name} that has the shape {shapes}")
    missing = report["missing_keys"]
    if (folder / EMBEDDING_MODULES).exists():
        # Embedding models have no output layer.
        missing = {name for name in missing if name.startswith(module.base_model_prefix)}
    if missing:
        raise damaged(folder, f"has no tensor {min(missing)}, which {type(module).__name__} needs")
    if unused := report["unexpected_keys"]:
        logger.warning("%s does not use %d tensors, such as %s", folder, len(unused), min(unused))


class _LazyTensor:
    """A tensor of a checkpoint that is read when it is indexed, like a slice of safetensors."""

    def __init__(self, read: Callable[[str, None], torch.Tensor], name: str) -> None:
        self._read, self._name = read, name

    def __getitem__(self, indices: Any) -> torch.Tensor:
        return self._read(self._name, None)[indices]


def _dequantized_source(
    folder: Path, dtype: str, checkpoint: Checkpoint | GgufCheckpoint, packs: bool
) -> tuple[Any, dict[str, Any]]:
    """Return a model's class, and the arguments that make it load packed and dequantized tensors.

    Transformers' own quantizers need GPUs or other packages for most formats.
    """
    config = AutoConfig.from_pretrained(folder)
    for each in (config, config.get_text_config()):
        vars(each).pop("quantization_config", None)
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    outline.config.dtype = config.dtype or checkpoint.dtype
    packable = packable_weights(outline) | packable_experts(outline) if packs else set()
    packed = partial(checkpoint.read_packed, dtype=DTYPES.get(dtype, outline.config.dtype))
    tensors = {
        name: _LazyTensor(packed if name in packable else checkpoint.read, name) for name in checkpoint.names
    }
    source = {"config": outline.config, "state_dict": tensors}
    return type(outline), {"pretrained_model_name_or_path": None, **source}


def pack_module(
    module: PreTrainedModel,
    device: torch.device,
    weight_dtype: str,
    num_segments: dict[str, int],
    arithmetic: str,
    packed: Mapping[str, list[PackedWeight]],
    allocate: Allocate = in_own_memory,
) -> PreTrainedModel:
    """Move a model to its device, and pack its weights there or fuse its layers."""
    module = module.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        sums = choose_sums(arithmetic, module.dtype)
        module.arithmetic = sums.name
        keep_latents(module, partial(HeadLinear, weight_dtype=weight_dtype, arithmetic=sums.name))
        pack_linear_layers(module, weight_dtype, num_segments, sums.name, packed, allocate)
        pack_experts(module, weight_dtype, sums.name, packed)
        # A single tensor that still refers to the mapped file of weights would keep the whole file in memory.
        for parameter in module.parameters():
            parameter.data = allocate(tuple(parameter.shape), parameter.dtype).copy_(parameter.data)
        for buffer in module.buffers():
            buffer.data = buffer.data.clone()
    else:
        # Triton comes with torch for CUDA; machines without a GPU may have none.
        from quire.engine.model.layers.gpu_layers import fuse_layers

        keep_latents(module, GpuHeadLinear)
        fuse_layers(module)
    return module
