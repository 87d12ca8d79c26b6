"""Loads one rank's slices of a model's weights, without reading the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.layers.experts import packable_experts
from quire.engine.model.layers.own_attention import implementation_at_load
from quire.engine.model.layers.packed_linear import packable_weights
from quire.engine.model.layers.parallel_layers import head_units
from quire.engine.model.parallel_plan import Division, ParallelPlan, read_plan
from quire.engine.weights.checkpoint import Checkpoint, open_checkpoint
from quire.engine.weights.converted_names import ConvertedCheckpoint
from quire.engine.weights.digest import model_digest
from quire.kernels.cpu.products.integer_weight import IntegerWeight
from quire.kernels.cpu.products.packed_weight import UNIT, PackedWeight

if TYPE_CHECKING:
    from quire.engine.weights.gguf_checkpoint import GgufCheckpoint


def load_slices(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None, rank: int, num_ranks: int
) -> tuple[PreTrainedModel, ParallelPlan, Mapping[str, list[PackedWeight]]]:
    """Return a model whose divided layers have only this rank's weights, and the plan of the whole model.

    Last come the weights that stay packed, by the names of the parameters that stand for them.

    Args:
        folder: the model's folder, with safetensors or a link to a GGUF file.
        dtype: the dtype of the weights; None means the checkpoint's own.

    Raises:
        SettingError: the model cannot be divided among this many ranks.
        UnsupportedModelError: the names of the checkpoint's tensors are not those of the model's parameters.
        ModelFileError: a tensor has not the shape of its parameter.
    """
    with open_checkpoint(folder) as checkpoint:
        dtype = dtype or getattr(config, "dtype", None) or checkpoint.dtype
        with _parameters_on_meta():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation_at_load(config)
            )
        plan = read_plan(model)
        plan.check(num_ranks)
        by_parameter = converted(checkpoint, model)
        _check_names(model, by_parameter, checkpoint)
        _check_tied(model, by_parameter)
        if isinstance(checkpoint, Checkpoint):
            checkpoint.check_shapes({name: tuple(each.shape) for name, each in model.named_parameters()})
        _check_dtype(model, dtype)
        _check_head(model, num_ranks)
        own = _slices(model, plan, rank, num_ranks)
        packable = packable_weights(model) | packable_experts(model)
        tensors = {}
        for name, parameter in model.named_parameters():
            read = partial(by_parameter.read_packed, dtype=dtype) if name in packable else by_parameter.read
            tensors[name] = read(name, own.get(name)).to(parameter.dtype)
        if any(isinstance(each, IntegerWeight) for weights in checkpoint.packed.values() for each in weights):
            raise UnsupportedModelError(
                "ranks cannot divide W8A8 layers: the scale of a token's inputs depends on all of them"
            )
        for name, buffer in model.named_buffers():
            if name in by_parameter.names:
                buffer.copy_(by_parameter.read(name, None))
    for name, tensor in tensors.items():
        _set_parameter(model, name, tensor)
    model.tie_weights()
    _set_sizes(model, plan, rank, num_ranks)
    if rank == 0:
        checkpoint.log_memory(model)
    return model, plan, checkpoint.packed


def digest_of_whole(folder: Path, module: PreTrainedModel, weight_dtype: str, packed: Iterable[str]) -> str:
    """Return ``digest_of`` the whole model; ``module`` has only slices of its weights."""
    own = module.state_dict(keep_vars=True)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with open_checkpoint(folder) as checkpoint:
        by_parameter = converted(checkpoint, module)

        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = own[name]
            is_buffer = id(tensor) not in names
            return tensor if is_buffer else by_parameter.read(names[id(tensor)], None).to(tensor.dtype)

        return digest_of(folder, own, read, weight_dtype, checkpoint, packed)


def digest_of(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor],
    weight_dtype: str,
    checkpoint: Checkpoint | GgufCheckpoint,
    packed: Iterable[str],
) -> str:
    """Return ``model_digest`` of a model, with the stored tensors in the place of packed weights.

    Args:
        state: the model's tensors, of which some stand for packed weights.
        read: returns a tensor that is not packed, by its name.
        checkpoint: what the weights are read from.
        packed: the names of the packed weights.
    """
    # Tied weights have several names.
    addresses = {state[name].data_ptr() for name in packed}
    stored = {f"{name} {role}": (name, role) for name in packed for role in checkpoint.stored_parts(name)}

    def read_any(name: str) -> torch.Tensor:
        if name not in stored:
            return read(name)
        whole, role = stored[name]
        return checkpoint.stored_parts(whole)[role]

    names = [name for name, tensor in state.items() if tensor.data_ptr() not in addresses]
    return model_digest(folder, [*names, *stored], read_any, weight_dtype)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Make parameters without memory within the block; buffers get their values as usual.

    Tied layers share a parameter, so one without memory may be registered again.
    """
    register = torch.nn.Module.register_parameter

    def register_on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            self._parameters[name] = torch.nn.Parameter(param.to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def converted(
    checkpoint: Checkpoint | GgufCheckpoint, model: PreTrainedModel
) -> ConvertedCheckpoint | GgufCheckpoint:
    """Return the tensors of a checkpoint by the names of a model's parameters."""
    return ConvertedCheckpoint(checkpoint, model) if isinstance(checkpoint, Checkpoint) else checkpoint


def _check_names(
    model: PreTrainedModel,
    by_parameter: ConvertedCheckpoint | GgufCheckpoint,
    checkpoint: Checkpoint | GgufCheckpoint,
) -> None:
    """Raise UnsupportedModelError unless each parameter has a tensor and each tensor a parameter."""
    parameters = {name for name, _ in model.named_parameters()}
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= set(getattr(model, "all_tied_weights_keys", None) or {})
    known |= {name for name, _ in model.named_buffers()}
    missing = parameters - by_parameter.names
    unknown = {
        name
        for name in by_parameter.names - known
        if not name.endswith("rotary_emb.inv_freq") and not checkpoint.is_bias_of_zeros(name)
    }
    buffers = set(model.state_dict()) - known
    if missing or unknown or buffers:
        raise UnsupportedModelError(
            "ranks read the tensors of a checkpoint by the names of the model's parameters, and these have "
            f"no counterpart: {', '.join(sorted(missing | unknown | buffers)[:5])}"
        )


def _check_tied(model: PreTrainedModel, by_parameter: ConvertedCheckpoint | GgufCheckpoint) -> None:
    """Raise UnsupportedModelError if tied weights differ: transformers unties such weights."""
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if {name, source} <= by_parameter.names and not torch.equal(
            by_parameter.read(name, None), by_parameter.read(source, None)
        ):
            raise UnsupportedModelError(
                f"its configuration ties {name} to {source}, and the checkpoint has other values for it, "
                "which ranks do not read; set tie_word_embeddings to false in config.json"
            )


def _check_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError if transformers would keep some weights in float32 with any dtype."""
    kept: list[str] = []
    if dtype in (torch.float16, torch.bfloat16):
        kept += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    if kept:
        raise UnsupportedModelError(
            f"it keeps some weights in float32 ({', '.join(sorted(kept))}), which ranks do not; "
            "choose --dtype float32"
        )


def _check_head(model: PreTrainedModel, num_ranks: int) -> None:
    """Raise UnsupportedModelError unless each rank gets some logits."""
    head, vocab_size = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    if type(head) is not torch.nn.Linear or head.weight.shape[0] != vocab_size:
        raise UnsupportedModelError(f"its output layer is no linear layer with {vocab_size} outputs")
    if vocab_size < num_ranks * UNIT:
        raise UnsupportedModelError(f"{num_ranks} ranks cannot divide a vocabulary of {vocab_size} tokens")


def _slices(
    model: PreTrainedModel, plan: ParallelPlan, rank: int, num_ranks: int
) -> dict[str, tuple[int, slice]]:
    """Return the dimension and the indices of this rank's part of each divided parameter."""
    parts: dict[str, tuple[int, slice]] = {}
    for path, each in plan.linears.items():
        own = each.own(rank, num_ranks)
        parts[f"{path}.weight"] = 0 if each.division is Division.COLUMN else 1, own
        if each.division is Division.COLUMN:
            parts[f"{path}.bias"] = 0, own
    for path, experts in plan.experts.items():
        for name, _ in model.get_submodule(path).named_parameters(recurse=False):
            parts[f"{path}.{name}"] = 0, experts.own(rank, num_ranks)
    head = model.get_output_embeddings()
    if head.weight is not model.get_input_embeddings().weight:
        first, end = head_units(head.weight.shape[0], rank, num_ranks)
        path = next(name for name, module in model.named_modules() if module is head)
        parts[f"{path}.weight"] = parts[f"{path}.bias"] = 0, slice(first * UNIT, end * UNIT)
    return parts


def _set_parameter(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    module.register_parameter(own_name, torch.nn.Parameter(tensor, requires_grad=False))
    if isinstance(module, torch.nn.Linear) and own_name == "weight":
        module.out_features, module.in_features = tensor.shape


def _set_sizes(model: PreTrainedModel, plan: ParallelPlan, rank: int, num_ranks: int) -> None:
    """Set the number of this rank's experts, and in each divided attention how many queries share a key."""
    for path, experts in plan.experts.items():
        own = experts.own(rank, num_ranks)
        model.get_submodule(path).num_experts = own.stop - own.start
    if plan.attention is None:
        return
    heads = plan.attention.own(plan.attention.num_heads, rank, num_ranks)
    num_groups = (heads.stop - heads.start) // len(plan.attention.own_kv_heads(rank, num_ranks))
    for path, each in plan.linears.items():
        if each.is_key_value:
            block = model.get_submodule(path.rpartition(".")[0])
            if hasattr(block, "num_key_value_groups"):
                block.num_key_value_groups = num_groups
