"""Linear layers and tied embeddings on the CPU; their weights are packed or quantized at load time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from transformers.pytorch_utils import Conv1D

from quire.kernels.cpu.intrinsics import GROUP
from quire.kernels.cpu.products.amx_product import FLOAT32
from quire.kernels.cpu.products.integer_product import MOST_INPUTS
from quire.kernels.cpu.products.integer_weight import quantize_to_integers
from quire.kernels.cpu.products.linear import linear
from quire.kernels.cpu.products.packed_weight import UNIT, Allocate, PackedWeight, in_own_memory
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.products.quantized_weight import quantize
from quire.settings.setting import SettingError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(torch.nn.Module):
    """A linear layer with a packed weight, for inference.

    Args:
        packed: the weight.
        bias: ``[out_features]``, or None.
        num_segments: equal segments of inputs that are summed separately.

    Attributes:
        packed: the weight.
        bias: float32, padded to the packed weight's columns; None if there is none.
    """

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None = None, num_segments: int = 1) -> None:
        super().__init__()
        self.num_segments = num_segments
        self.packed = packed
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(self.packed.num_units * UNIT)
            self.bias[: self.out_features] = bias.detach()

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[out_features, in_features]``; each access unpacks and dequantizes it again."""
        return self.packed.unpack()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs @ weight.T + bias``."""
        return linear(inputs, self.packed, self.bias, self.num_segments)


class PackedEmbedding(torch.nn.Module):
    """An embedding that is tied to the output layer, and reads its packed weight.

    Attributes:
        packed: the weight.
        scale: factor of the embedding.
    """

    def __init__(self, packed: PackedWeight, scale: float) -> None:
        super().__init__()
        self.packed = packed
        self.scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return ``[*token_ids.shape, hidden_size]``."""
        vectors = self.packed.rows(token_ids)
        return vectors if self.scale == 1.0 else vectors * self.scale

    @property
    def weight(self) -> _Rows:
        """The weight, for models that read rows of it themselves."""
        return _Rows(self.packed)


@dataclass(frozen=True)
class _Rows:
    """The rows of a packed weight, unpacked when they are read as ``rows[index, :]``."""

    packed: PackedWeight

    def __getitem__(self, index: tuple[int, slice]) -> torch.Tensor:
        return self.packed.rows(torch.tensor(index[0]))


def pack_linear_layers(
    model: torch.nn.Module,
    weight_dtype: str = "auto",
    num_segments: Mapping[str, int] | None = None,
    arithmetic: str = FLOAT32,
    stored: Mapping[str, list[PackedWeight]] = MappingProxyType({}),
    allocate: Allocate = in_own_memory,
) -> None:
    """Replace a model's linear layers on the CPU, and the embeddings that share a weight with one of them.

    Args:
        model: the model.
        weight_dtype: "auto" or "dequantized" (the model's own), "w8a8" or a key of ``QUANTIZED``.
        num_segments: number of segments of inputs by the layer's name; 1 for all other layers.
        arithmetic: the order of sums of weights that are not quantized, see ``pack``.
        stored: weights that the checkpoint has packed already, by the names of the model's parameters.
        allocate: allocates the packed weights.

    Raises:
        SettingError: a layer cannot be quantized, since its inputs cannot be divided into groups.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in stored}
    at_addresses = {parameter.data_ptr(): stored[name][0] for name, parameter in parameters.items()}
    embeddings = _find_embeddings(model)
    # This list has only the layers' parents, so each layer's weight is freed before the next layer is packed.
    parents = [(name, each) for name, each in model.named_modules() if any(True for _ in each.children())]
    for parent_name, parent in parents:
        for name in [name for name, _ in parent.named_children()]:
            path = f"{parent_name}.{name}".removeprefix(".")
            segments = (num_segments or {}).get(path, 1)
            module = parent.get_submodule(name)
            weight = _weight(module)
            if weight is None or not weight.is_cpu or weight.dtype not in _DTYPES:
                continue
            address = weight.data_ptr()
            packed = at_addresses.get(address)
            if packed is None:
                packed = pack_weight(name, weight.detach(), weight_dtype, arithmetic, allocate)
            bias = dict(module.named_parameters()).get("bias")
            layer = PackedLinear(packed, bias, segments)
            del module, weight, bias
            setattr(parent, name, layer)
            if address in embeddings:
                owner, its_name, scale = embeddings[address]
                setattr(owner, its_name, PackedEmbedding(layer.packed, scale))


def pack_weight(
    name: str,
    weight: torch.Tensor,
    weight_dtype: str,
    arithmetic: str,
    allocate: Allocate = in_own_memory,
) -> PackedWeight:
    """Pack or quantize the weight ``[out_features, in_features]`` of a layer of that name.

    Raises:
        SettingError: it cannot be quantized.
    """
    if weight_dtype in ("auto", "dequantized"):
        return pack(weight, arithmetic, allocate)
    if weight.shape[1] % GROUP:
        raise SettingError(
            f"weights cannot be {weight_dtype}: {name} has {weight.shape[1]} inputs, which is no "
            f"multiple of {GROUP}"
        )
    if weight_dtype == "w8a8" and weight.shape[1] > MOST_INPUTS:
        raise SettingError(f"weights cannot be w8a8: {name} has more than {MOST_INPUTS} inputs")
    if weight_dtype == "w8a8":
        return quantize_to_integers(weight, allocate)
    return quantize(weight, weight_dtype, allocate)


def _find_embeddings(model: torch.nn.Module) -> dict[int, tuple[torch.nn.Module, str, float]]:
    """Return the parent, name and scale of each embedding, by the address of its weight."""
    found = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Embedding) and child.max_norm is None:
                is_scaled = type(child).__name__.endswith("ScaledWordEmbedding")
                if type(child) is torch.nn.Embedding or is_scaled:
                    found[child.weight.data_ptr()] = (parent, name, embedding_scale(child))
    return found


def packable_weights(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that only become weights of packed linear layers and embeddings."""
    weights = {
        id(module.weight)
        for name, module in model.named_modules()
        # Latent attention divides this layer.
        if type(module) is torch.nn.Linear and not name.endswith("kv_b_proj")
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}


def embedding_scale(embedding: torch.nn.Module) -> float:
    """Return the factor of an embedding, rounded to its dtype as its module does."""
    scale = getattr(embedding, "embed_scale", None)
    if scale is None:
        return 1.0
    weight = embedding.get_parameter("weight")
    return float(torch.as_tensor(scale).to(weight.dtype))


def _weight(module: torch.nn.Module) -> torch.Tensor | None:
    """Return a linear layer's weight ``[out_features, in_features]``; None for any other module.

    Subclasses of linear layers count as other modules, since they may do more than multiply. Only Falcon's
    is known to do the same.
    """
    if type(module) is torch.nn.Linear or type(module).__name__ == "FalconLinear":
        return module.get_parameter("weight")
    # Conv1D is GPT-2's linear layer, whose weight is transposed.
    return module.get_parameter("weight").T.contiguous() if type(module) is Conv1D else None
