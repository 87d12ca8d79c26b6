"""Loads a transformers model for paged serving, or says why it cannot be served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from quire.engine.kv_cache.memory import dtype_name
from quire.engine.model.arithmetic import arithmetic_name, choose_sums
from quire.engine.model.check import KvHeads, UnsupportedModelError, check_paging, observe_attention
from quire.engine.model.collectives import Collectives
from quire.engine.model.layers import attention, experts, own_attention
from quire.engine.model.layers.parallel_layers import connect_ranks
from quire.engine.model.layers.row_layers import KernelFunctions, make_batch_invariant
from quire.engine.model.parallel_plan import DividedLinear, ParallelPlan, read_plan
from quire.engine.model.positions import pass_positions
from quire.engine.model.program.checked_recipe import find_recipe, recipe_of
from quire.engine.model.program.recipe import StepRecipe
from quire.engine.model.states import with_states
from quire.engine.weights.checkpoint import open_checkpoint
from quire.engine.weights.shared_module import load_shared, source_of
from quire.engine.weights.sliced_weights import digest_of, digest_of_whole, load_slices
from quire.engine.weights.weights_file import WeightsFile
from quire.engine.weights.whole_model import DTYPES, load_module, pack_module
from quire.kernels.cpu.products.packed_weight import Allocate, in_own_memory
from quire.kvindex.kv_layout import KvShape
from quire.models.file_checks import read_object
from quire.models.model_files import check_configuration
from quire.models.source import GENERATION_CONFIG, find_model
from quire.settings.setting import SettingError

_RECIPE, _NO_RECIPE = b"it runs as one program", b"it runs module by module"
_ORIGINAL = "original_max_position_embeddings"
UNLIMITED = 1 << 20
"""Most tokens of a sequence if the model sets no limit, for example because it has no positions."""

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
    divided: Mapping[str, DividedLinear] = field(default_factory=dict)
    """The linear layers that ranks divide, by their names."""
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
        weight_dtype: "auto" (the checkpoint's own), "dequantized" (the model's dtype), "w8a8" or a key of
            ``QUANTIZED``, for linear layers.
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
    check_configuration(folder)
    config = AutoConfig.from_pretrained(folder)
    check_supported(config.get_text_config())
    return _load_checked(
        _Wanted(folder, config, dtype, device, weight_dtype, arithmetic), collectives, weights_file
    )


class _Wanted(NamedTuple):
    """What is to be loaded; see ``load_model``."""

    folder: Path
    config: PreTrainedConfig
    dtype: str
    device: torch.device
    weight_dtype: str
    arithmetic: str


def _load_checked(
    wanted: _Wanted, collectives: Collectives | None, weights_file: WeightsFile | None
) -> LoadedModel:
    """Load a model, and check that it can run over paged blocks."""
    (module, digest, plan), shared_bytes = _load(wanted, collectives, weights_file)
    if module.dtype not in DTYPES.values():
        raise UnsupportedModelError(f"its weights are {module.dtype}: choose --dtype {' or '.join(DTYPES)}")
    text_config = wanted.config.get_text_config()
    max_position_embeddings = _connect(module, text_config)
    check = _Check(module, wanted.config, max_position_embeddings, collectives)
    heads, recipe = check.with_notes_in(weights_file) if shared_bytes and weights_file else check()
    num_kv_heads, own_kv_heads = _kv_heads(heads, plan, collectives)
    sums = choose_sums(wanted.arithmetic, module.dtype)
    return LoadedModel(
        module=module,
        folder=wanted.folder,
        digest=digest,
        dtype=module.dtype,
        num_layers=heads.num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=heads.head_dim,
        max_position_embeddings=max_position_embeddings,
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos_token_ids(wanted.folder, text_config),
        heads=heads,
        recipe=recipe,
        arithmetic=arithmetic_name(sums, wanted.device, recipe is not None and not recipe.uses_torch),
        collectives=collectives,
        divided=plan.linears,
        own_kv_heads=own_kv_heads,
        shared_bytes=shared_bytes,
    )


def _load(
    wanted: _Wanted, collectives: Collectives | None, weights_file: WeightsFile | None
) -> tuple[_Loaded, int]:
    """Load the model or a rank's part; last comes the memory that its weights share with others, in bytes."""
    shared_bytes = 0
    with KernelFunctions():
        if collectives is not None:
            loaded = _load_part(wanted, collectives)
        elif weights_file is None or wanted.device.type != "cpu":
            loaded = _load_whole(wanted)
        else:
            source = source_of(wanted.folder, wanted.dtype, wanted.weight_dtype, wanted.arithmetic)
            load = partial(_load_whole, wanted)
            loaded, shared_bytes = load_shared(weights_file, source, attrgetter("module"), load)
        if wanted.device.type == "cpu":
            make_batch_invariant(loaded.module)
    return loaded, shared_bytes


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


class _Check(NamedTuple):
    """Checks that a model can run over paged blocks, and whether it can run as one program."""

    module: PreTrainedModel
    config: PreTrainedConfig
    num_positions: int
    collectives: Collectives | None

    def __call__(self) -> tuple[KvHeads, StepRecipe | None]:
        """Return the model's KV heads, and its recipe if it has one.

        Raises:
            UnsupportedModelError: it cannot run over paged blocks.
        """
        vocab_size = self.config.get_text_config().vocab_size
        with self._named_errors():
            heads = self._observe()
            check_paging(self.module, heads, vocab_size, self.num_positions)
        if self.module.device.type != "cpu":
            return heads, None
        return heads, find_recipe(self.module, heads, vocab_size, self.num_positions, self.collectives)

    def with_notes_in(self, file: WeightsFile) -> tuple[KvHeads, StepRecipe | None]:
        """Return the same, but compute with the model only if no worker has with the weights of this file."""
        try:
            with file.locked():
                if not (found := file.read_notes()):
                    heads, recipe = self()
                    file.write_notes(_NO_RECIPE if recipe is None else _RECIPE)
                    return heads, recipe
        except TimeoutError:
            return self()
        with self._named_errors():
            heads = self._observe()
        return heads, recipe_of(self.module) if found == _RECIPE else None

    def _observe(self) -> KvHeads:
        return observe_attention(self.module, self.config.get_text_config(), self.num_positions)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{self.config.model_type}: {error}") from error


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


class _Loaded(NamedTuple):
    """A model or a rank's part of it, the digest of the whole model, and how the model can be divided."""

    module: PreTrainedModel
    digest: str
    plan: ParallelPlan


def _load_whole(wanted: _Wanted, allocate: Allocate = in_own_memory) -> _Loaded:
    folder, config, dtype, device, weight_dtype, arithmetic = wanted
    with open_checkpoint(folder) as checkpoint:
        packs = device.type == "cpu" and weight_dtype == "auto"
        module = load_module(folder, config, dtype, checkpoint, packs)
        state, packed = module.state_dict(), checkpoint.packed
        digest = digest_of(folder, state, state.__getitem__, weight_dtype, checkpoint, packed)
    plan = read_plan(module)
    segments = plan.num_segments(0, 1)
    module = pack_module(module, device, weight_dtype, segments, arithmetic, packed, allocate)
    return _Loaded(module, digest, plan)


def _load_part(wanted: _Wanted, collectives: Collectives) -> _Loaded:
    folder, config, dtype, device, weight_dtype, arithmetic = wanted
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
    module = pack_module(module, device, weight_dtype, segments, arithmetic, packed)
    connect_ranks(module, plan, config.get_text_config().vocab_size, collectives)
    return _Loaded(module, digest, plan)


def check_supported(config: Any) -> None:
    """Raise UnsupportedModelError for features that the check with a short prompt might not reveal."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: encoder-decoder models are not supported")
    paged = {"full_attention", "sliding_attention", *own_attention.kinds_of_layers(config)}
    kinds = set(getattr(config, "layer_types", None) or ()) - paged - {"mlp", "moe"}
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
