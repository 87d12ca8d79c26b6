"""Loads a transformers model for paged serving, or says why it cannot be served."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from quire.engine.kv_cache.memory import dtype_name
from quire.engine.model import attention, experts, own_attention
from quire.engine.model.arithmetic import arithmetic_name, choose_sums
from quire.engine.model.check import KvHeads, UnsupportedModelError, check_paging, observe_attention
from quire.engine.model.collectives import Collectives
from quire.engine.model.compiled_step import find_recipe
from quire.engine.model.experts import pack_experts, packable_experts
from quire.engine.model.latent_attention import keep_latents
from quire.engine.model.packed_linear import pack_linear_layers, packable_weights
from quire.engine.model.parallel_layers import connect_ranks
from quire.engine.model.parallel_plan import ParallelPlan, read_plan
from quire.engine.model.positions import pass_positions
from quire.engine.model.row_layers import KernelFunctions, make_batch_invariant
from quire.engine.model.states import with_states
from quire.engine.model.step_recipe import StepRecipe
from quire.engine.weights.checkpoint import Checkpoint, open_checkpoint
from quire.engine.weights.files import check_configuration, check_weights
from quire.engine.weights.shared_module import load_shared, source_of
from quire.engine.weights.sliced_weights import digest_of, digest_of_whole, load_slices
from quire.engine.weights.weights_file import WeightsFile
from quire.kernels.cpu.linear import PackedWeight
from quire.kvindex.kv_layout import KvShape
from quire.models.file_checks import read_object
from quire.models.source import GENERATION_CONFIG, find_model
from quire.settings.setting import SettingError

if TYPE_CHECKING:
    from quire.engine.weights.gguf_checkpoint import GgufCheckpoint

_ORIGINAL = "original_max_position_embeddings"
UNLIMITED = 1 << 20
"""Most tokens of a sequence if the model sets no limit, for example because it has no positions."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""Torch's names of the dtypes of KV blocks, in addition to "auto", the model's own dtype."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run and the facts that the services need."""

    module: PreTrainedModel
    folder: Path
    """Folder with the model's files."""
    digest: str
    """Digest of the whole model; empty on the ranks other than 0."""
    dtype: torch.dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    heads: KvHeads
    recipe: StepRecipe | None
    """Recipe to run the model as one program; None if it runs module by module, as on a GPU."""
    arithmetic: str
    """Name of the sums that it makes; see ``quire.engine.model.arithmetic``."""
    collectives: Collectives | None = None
    """Collectives of the ranks that the model is divided among; None if there is one process."""
    own_kv_heads: range | None = None
    """The KV heads that this rank computes; None means all."""
    shared_bytes: int = 0
    """Memory that the weights share with those of other workers, in bytes."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many tokens a token attends to; None means all."""
        return self.heads.windows

    @property
    def can_rank_blocks(self) -> bool:
        """Whether all layers keep keys and values, and these have one shape."""
        return self.heads.are_alike and not self.heads.latent_dim and self.heads.states is None

    @property
    def has_windows(self) -> bool:
        """Whether some layer has a sliding window."""
        return any(window is not None for window in self.windows)

    @property
    def window(self) -> int | None:
        """Largest window of all layers, in tokens; None if some layer attends to all tokens."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    def kv_shape(self, block_size: int, kv_cache_dtype: str = "auto") -> KvShape:
        """Return the shape of this model's KV blocks, in the model's dtype or one of ``KV_CACHE_DTYPES``."""
        dtype = dtype_name(self.dtype) if kv_cache_dtype == "auto" else KV_CACHE_DTYPES[kv_cache_dtype]
        is_mixed = self.has_windows and self.window is None and not self.heads.latent_dim
        shape = KvShape(
            self.num_layers,
            self.num_kv_heads,
            block_size,
            self.head_dim,
            dtype,
            latent_dim=self.heads.latent_dim,
            window=max((each for each in self.windows if each is not None), default=0) if is_mixed else 0,
            window_layers=tuple(i for i, each in enumerate(self.windows) if each) if is_mixed else (),
        )
        if self.heads.states is None:
            return shape
        if shape.is_quantized:
            raise SettingError(
                "the model has layers with a state, which 8-bit blocks cannot hold: leave their type at auto"
            )
        return with_states(shape, self.heads.states)


def load_model(
    model: str,
    dtype: str,
    device: torch.device,
    weight_dtype: str = "auto",
    arithmetic: str = "auto",
    collectives: Collectives | None = None,
    weights_file: WeightsFile | None = None,
) -> LoadedModel:
    """Load a causal language model from a folder or from the hub.

    Args:
        model: a folder, a GGUF file, or a hub id, which may end with "@" and a revision.
        dtype: "auto" (the checkpoint's own) or a key of ``DTYPES``.
        device: the device to run the model on.
        weight_dtype: "auto" (the model's own), "w8a8" or a key of ``QUANTIZED``, for linear layers.
        arithmetic: "auto" (the fastest sums of this machine) or "portable" (those of every processor).
        collectives: those of the ranks that share the model and all call this; None loads the whole model.
        weights_file: the file in which workers on the CPU share the whole model's weights; None: there is
            none.

    Raises:
        UnsupportedModelError: the architecture cannot run over paged blocks.
        SettingError: linear layers cannot be quantized, on this device or at all, or the model cannot be
            divided among the ranks.
        RanksError: a rank has failed.
        OSError: there is no such model, or a file of it is missing, damaged or not safetensors.
    """
    _check_weight_dtype(weight_dtype, device)
    attention.register()
    experts.register()
    folder = find_model(model)
    _check_configuration(folder)
    config = AutoConfig.from_pretrained(folder)
    text_config = config.get_text_config()
    check_supported(text_config)
    with KernelFunctions():
        loaded, shared_bytes = _load(
            folder, config, dtype, device, weight_dtype, arithmetic, collectives, weights_file
        )
        module, digest, plan = loaded
        if device.type == "cpu":
            make_batch_invariant(module)
    max_position_embeddings = _connect(module, text_config)
    heads = _checked_heads(module, config, max_position_embeddings)
    recipe = None
    if device.type == "cpu":
        recipe = find_recipe(module, heads, text_config.vocab_size, max_position_embeddings, collectives)
    num_kv_heads, own_kv_heads = _kv_heads(heads, plan, collectives)
    return LoadedModel(
        module=module,
        folder=folder,
        digest=digest,
        dtype=module.dtype,
        num_layers=heads.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=max_position_embeddings,
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(folder, text_config),
        heads=heads,
        recipe=recipe,
        arithmetic=arithmetic_name(choose_sums(arithmetic, module.dtype), device, recipe is not None),
        collectives=collectives,
        own_kv_heads=own_kv_heads,
        shared_bytes=shared_bytes,
    )


def _load(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    weight_dtype: str,
    arithmetic: str,
    collectives: Collectives | None,
    weights_file: WeightsFile | None,
) -> tuple[_Loaded, int]:
    """Load the model or a rank's part; last comes the memory that its weights share with others, in bytes."""
    if collectives is not None:
        return _load_part(folder, config, dtype, weight_dtype, arithmetic, collectives), 0
    load = partial(_load_whole, folder, config, dtype, device, weight_dtype, arithmetic)
    if weights_file is None or device.type != "cpu":
        return load(), 0
    source = source_of(folder, dtype, weight_dtype, arithmetic)
    return load_shared(weights_file, source, _module_of, load)


def _connect(module: PreTrainedModel, text_config: Any) -> int:
    """Connect a model's attention and positions to the steps; return how many positions it has."""
    own_attention.connect(module)
    return most_positions(text_config) - pass_positions(module)


def _check_weight_dtype(weight_dtype: str, device: torch.device) -> None:
    if weight_dtype != "auto" and device.type != "cpu":
        raise SettingError(
            f"weights can be {weight_dtype} only on the CPU, and the model runs on {device.type!r}: "
            "leave their type at auto"
        )


def _checked_heads(module: PreTrainedModel, config: PreTrainedConfig, num_positions: int) -> KvHeads:
    """Return a model's KV heads; raise UnsupportedModelError if it cannot run over paged blocks."""
    text_config = config.get_text_config()
    try:
        heads = observe_attention(module, text_config, num_positions)
        check_paging(module, heads, text_config.vocab_size, num_positions)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config.model_type}: {error}") from error
    return heads


def _kv_heads(
    heads: KvHeads, plan: ParallelPlan, collectives: Collectives | None
) -> tuple[int, range | None]:
    """Return how many KV heads a block contains, and this rank's heads; None means all of them."""
    if collectives is None or plan.attention is None:
        return heads.num_kv_heads, None
    if not heads.are_alike:
        raise UnsupportedModelError("ranks cannot divide layers whose keys and values differ in shape")
    own = plan.attention.own_kv_heads(collectives.rank, collectives.num_ranks)
    return plan.attention.num_kv_heads, own


def _check_configuration(folder: Path) -> None:
    """Raise OSError for a folder that holds no model."""
    if (folder / "adapter_config.json").exists():
        raise OSError(
            f"{folder} holds an adapter (adapter_config.json), which is no model: "
            "serve its model with --lora name=folder, or merge it into its model"
        )
    check_configuration(folder)


class _Loaded(NamedTuple):
    """A model or a rank's part of it, the digest of the whole model, and how the model can be divided."""

    module: PreTrainedModel
    digest: str
    plan: ParallelPlan


def _module_of(loaded: _Loaded) -> PreTrainedModel:
    return loaded.module


def _load_whole(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    weight_dtype: str,
    arithmetic: str,
) -> _Loaded:
    check_weights(folder)
    with open_checkpoint(folder) as checkpoint:
        packs = device.type == "cpu" and weight_dtype == "auto"
        module = _load_module(folder, config, dtype, checkpoint, packs)
        state, packed = module.state_dict(), checkpoint.packed
        digest = digest_of(folder, state, state.__getitem__, weight_dtype, checkpoint, packed)
    plan = read_plan(module)
    segments = plan.num_segments(0, 1)
    module = _pack_module(module, device, weight_dtype, segments, arithmetic, packed)
    return _Loaded(module, digest, plan)


def _load_part(
    folder: Path,
    config: PreTrainedConfig,
    dtype: str,
    weight_dtype: str,
    arithmetic: str,
    collectives: Collectives,
) -> _Loaded:
    check_weights(folder)
    rank, num_ranks = collectives.rank, collectives.num_ranks
    if kinds := own_attention.kinds_of_layers(config.get_text_config()):
        special = {"conv": "with a short convolution", "chunked_attention": "that attend within chunks"}
        what = next((text for kind, text in special.items() if kind in kinds), "with a state")
        raise SettingError(
            f"the model cannot be divided among {num_ranks} processes: it has layers {what}; "
            "choose a tensor-parallel size of 1"
        )
    chosen = None if dtype == "auto" else DTYPES[dtype]
    module, plan, packed = load_slices(folder, config, chosen, rank, num_ranks)
    digest = digest_of_whole(folder, module, weight_dtype, packed) if rank == 0 else ""
    segments = plan.num_segments(rank, num_ranks)
    module = _pack_module(module, torch.device("cpu"), weight_dtype, segments, arithmetic, packed)
    connect_ranks(module, plan, config.get_text_config().vocab_size, collectives)
    return _Loaded(module, digest, plan)


def _load_module(
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
    model_class: Any = AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "use_safetensors": True}
    try:
        with torch.random.fork_rng(devices=[]):
            # Embedding models may have no output layer; all workers then have to make the same one.
            torch.manual_seed(0)
            if not checkpoint.is_plain:
                model_class, source = _dequantized_source(folder, dtype, checkpoint, packs)
            module: PreTrainedModel = model_class.from_pretrained(
                **source,
                dtype="auto" if dtype == "auto" else DTYPES[dtype],
                attn_implementation=own_attention.implementation_at_load(config),
            )
    except (ImportError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        if checkpoint.error is not None:
            raise checkpoint.error from error
        raise UnsupportedModelError(
            f"transformers cannot load {folder} with paged attention: {error}"
        ) from error
    checkpoint.log_memory(module)
    return module


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
    tensors = checkpoint.lazy_tensors(packable, DTYPES.get(dtype, outline.config.dtype))
    source = {"config": outline.config, "state_dict": tensors}
    return type(outline), {"pretrained_model_name_or_path": None, **source}


def _pack_module(
    module: PreTrainedModel,
    device: torch.device,
    weight_dtype: str,
    num_segments: dict[str, int],
    arithmetic: str,
    packed: Mapping[str, list[PackedWeight]],
) -> PreTrainedModel:
    """Move a model to its device, and pack its weights there or fuse its layers."""
    module = module.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        sums = choose_sums(arithmetic, module.dtype)
        keep_latents(module, weight_dtype, sums.name)
        pack_linear_layers(module, weight_dtype, num_segments, sums.name, packed)
        pack_experts(module, weight_dtype, sums.name, packed)
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            # A single tensor that still refers to the mapped file of weights would keep the whole file in
            # memory.
            tensor.data = tensor.data.clone()
    else:
        # Triton comes with torch for CUDA; machines without a GPU may have none.
        from quire.engine.model.gpu_layers import fuse_layers

        fuse_layers(module)
    return module


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError for features that the check with a short prompt might not reveal."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: encoder-decoder models are not supported")
    paged = {"full_attention", "sliding_attention", *own_attention.kinds_of_layers(config)}
    kinds = set(getattr(config, "layer_types", None) or ()) - paged
    if kinds:
        raise UnsupportedModelError(f"{name}: layers of type {sorted(kinds)} keep no paged KV cache")


def most_positions(config: Any) -> int:
    """Return how many positions a model has.

    A rope of type ``longrope`` turns all keys differently once a sequence of the batch is longer than the
    original positions. The model therefore has only these.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    limits: list[int] = [
        getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", UNLIMITED))
    ]
    limits += [each[_ORIGINAL] for each in ropes if each.get("rope_type") == "longrope"]
    return min(limits)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    path = folder / GENERATION_CONFIG
    eos = read_object(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
