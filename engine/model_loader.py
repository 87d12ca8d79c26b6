"""Loads a transformers model for paged serving, or says why it cannot be served."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.engine import attention
from quire.engine.kv_memory import KvShape
from quire.engine.model_check import UnsupportedModelError, check_paging, observe_attention
from quire.engine.packed_linear import pack_linear_layers
from quire.engine.row_activations import keep_rows_alike

UNLIMITED = 1 << 20
"""Most tokens of a model that does not limit them, such as one without positions."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What blocks can be stored in besides the model's own dtype, "auto"."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run and the facts that the services need."""

    module: PreTrainedModel
    digest: str
    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    windows: tuple[int | None, ...]
    """Tokens that each layer sees, None for all."""

    @property
    def window(self) -> int | None:
        """How many tokens any layer sees; None if some layer sees all."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    def kv_shape(self, block_size: int, kv_cache_dtype: str = "auto") -> KvShape:
        """Return the shape of this model's KV blocks, in its own dtype or one of ``KV_CACHE_DTYPES``."""
        dtype = self.dtype if kv_cache_dtype == "auto" else KV_CACHE_DTYPES[kv_cache_dtype]
        return KvShape(self.num_layers, self.num_kv_heads, block_size, self.head_dim, dtype)


def load_model(model: str, dtype: str, device: torch.device) -> LoadedModel:
    """Load a causal language model from a folder or from the hub.

    Args:
        model: a folder in Hugging Face format, or a hub id.
        dtype: "auto" (the checkpoint's own) or a key of ``DTYPES``.

    Raises:
        UnsupportedModelError: the architecture cannot run over paged blocks.
        OSError: there is no such model.
    """
    attention.register()
    # Its bars would tear the launcher's.
    transformers_logging.disable_progress_bar()
    folder = Path(model) if Path(model).is_dir() else Path(snapshot_download(model))
    config = AutoConfig.from_pretrained(folder)
    text_config = config.get_text_config()
    check_supported(text_config)
    module = _load_module(folder, dtype, device)
    try:
        heads = observe_attention(module)
        check_paging(module, heads, text_config.vocab_size)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config.model_type}: {error}") from error
    return LoadedModel(
        module=module,
        digest=digest(folder),
        dtype=module.dtype,
        num_layers=heads.num_layers,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=getattr(text_config, "max_position_embeddings", UNLIMITED),
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(folder, text_config),
        windows=heads.windows,
    )


def _load_module(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype == "auto" else DTYPES[dtype],
            attn_implementation=attention.IMPLEMENTATION,
        )
    except (ImportError, KeyError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load {folder} with paged attention: {error}"
        ) from error
    module = module.to(device).eval().requires_grad_(False)
    pack_linear_layers(module)
    if device.type == "cpu":
        keep_rows_alike(module)
    return module


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError for what a short prompt would not show, or not as clearly."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: encoder-decoder models are not supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise UnsupportedModelError(f"{name}: layers of type {sorted(kinds)} keep no paged KV cache")
    rope_type = _rope_type(config)
    if rope_type in {"dynamic", "longrope"}:
        raise UnsupportedModelError(
            f"{name}: rope type {rope_type!r} rotates by the longest sequence of the batch, "
            "so cached keys would depend on other requests"
        )


def _rope_type(config: Any) -> str:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(rope.get("rope_type", rope.get("type", "default")))


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    has_generation_config = (folder / "generation_config.json").exists()
    source = GenerationConfig.from_pretrained(folder) if has_generation_config else config
    eos = source.eos_token_id if source.eos_token_id is not None else getattr(config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def digest(folder: Path) -> str:
    """Identify a model: its configuration, and name, size, header and samples of its weight files.

    Samples, since reading all of a large checkpoint would take minutes: 64 pages of 4 KiB, spread evenly.
    """
    state = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    state.update(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        state.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            state.update(file.read(min(header_size, size)))
            for sample in range(64):
                file.seek(max(0, size - 4096) * sample // 63)
                state.update(file.read(4096))
    return state.hexdigest()[:32]
