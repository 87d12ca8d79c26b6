"""Which linear layers of a model can be divided among processes, from the model's own plan.

transformers names a style for the layers of most architectures (``base_model_tp_plan``). A block of layers,
such as an attention or an MLP, is divided only if its linear layers are all "colwise" or "rowwise" and
nothing in it needs the values of all processes. Each process computes every other block as a whole: the plans
of some architectures gather values within a block, which costs more than it saves on one machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from quire.kernels.cpu.linear import num_segments_of
from quire.settings.setting import SettingError

_COLUMN, _ROW = "colwise", "rowwise"
_ELEMENTWISE = (
    torch.nn.Dropout,
    torch.nn.Identity,
    *{kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()},
)
_EACH_ALIKE = "replicated_with_grad_allreduce"
"""Style of norms that each process applies to its own heads."""


class Division(Enum):
    """How a linear layer is divided: by its outputs, or by its inputs with a sum over all processes."""

    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True)
class DividedLinear:
    """A linear layer that can be divided.

    Attributes:
        num_parts: equal parts that stay together, of the outputs or of the inputs: attention heads, or single
            values of an MLP.
        is_key_value: whether its outputs are keys or values.
        num_segments: segments of inputs that are summed separately; 1 if it is divided by its outputs.
    """

    division: Division
    num_parts: int
    is_key_value: bool
    num_segments: int


@dataclass(frozen=True)
class ParallelPlan:
    """The layers of a model that can be divided.

    Attributes:
        linears: the layers by their full names; each process computes all others as a whole.
        num_heads: query heads of each attention; 0 if attention is not divided.
        num_kv_heads: key-value heads of each attention.
    """

    linears: dict[str, DividedLinear]
    num_heads: int
    num_kv_heads: int

    @property
    def num_segments(self) -> dict[str, int]:
        """The number of segments of inputs of each layer that is divided by its inputs."""
        return {
            name: each.num_segments for name, each in self.linears.items() if each.division is Division.ROW
        }

    def check(self, num_ranks: int) -> None:
        """Raise SettingError if the model cannot be divided among this many processes."""
        problem = self._problem(num_ranks)
        if problem is not None:
            raise SettingError(
                f"the model cannot be divided among {num_ranks} processes: {problem}; "
                "choose another tensor-parallel size, or 1"
            )

    def _problem(self, num_ranks: int) -> str | None:
        if num_ranks & (num_ranks - 1):
            return "the number of ranks must be a power of two, or other sums would give other bits"
        if not self.linears:
            return "its architecture has no plan to divide its layers"
        if self.num_heads % num_ranks:
            return f"it has {self.num_heads} attention heads"
        if self.num_heads and self.num_kv_heads % num_ranks and num_ranks % self.num_kv_heads:
            return f"it has {self.num_kv_heads} key-value heads"
        for name, each in self.linears.items():
            if each.division is Division.ROW and each.num_segments % num_ranks:
                return f"the inputs of {name} have only {each.num_segments} segments that are summed apart"
        return None


def own_parts(num_parts: int, rank: int, num_ranks: int) -> range:
    """Return the parts of a rank, of parts in equal shares.

    The number of parts is a multiple of the number of ranks, or divides it. If there are more ranks than
    parts, several ranks have the same part.
    """
    first = rank * num_parts // num_ranks
    return range(first, first + max(1, num_parts // num_ranks))


def read_plan(model: PreTrainedModel) -> ParallelPlan:
    """Return the plan of a model whose linear layers are torch's; it may be on the meta device."""
    config = model.config.get_text_config()
    styles = _styles(model, config)
    linears: dict[str, DividedLinear] = {}
    num_heads, num_kv_heads = int(getattr(config, "num_attention_heads", 0)), 0
    for name, block in model.named_modules():
        divided = _divide_block(name, block, styles, config)
        linears |= divided
        if any(each.is_key_value for each in divided.values()):
            num_kv_heads = _num_kv_heads(config)
    return ParallelPlan(linears, num_heads if num_kv_heads else 0, num_kv_heads)


def _styles(model: PreTrainedModel, config: Any) -> dict[str, str]:
    """Return the style of each module that the model's plan names, by the module's full name."""
    rules = getattr(config, "base_model_tp_plan", None) or {}
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    patterns = [
        (re.compile(re.escape(prefix + rule).replace(r"\*", r"\d+")), style) for rule, style in rules.items()
    ]
    return {
        name: style
        for name, _ in model.named_modules()
        for pattern, style in patterns
        if pattern.fullmatch(name)
    }


def _divide_block(
    name: str, block: torch.nn.Module, styles: dict[str, str], config: Any
) -> dict[str, DividedLinear]:
    """Return the divided layers among the children of a module; none if it must be computed as a whole."""
    own = {f"{name}.{child}": module for child, module in block.named_children()}
    columns = [path for path in own if styles.get(path) == _COLUMN]
    rows = [path for path in own if styles.get(path) == _ROW]
    if (
        not columns
        or len(rows) != 1
        or not all(type(own[each]) is torch.nn.Linear for each in columns + rows)
    ):
        return {}
    is_attention = any(path.endswith(".k_proj") for path in columns)
    others = [path for path in own if path not in (*columns, *rows)]
    head_dim = int(getattr(block, "head_dim", 0))
    if not all(_is_alike(path, own[path], styles, head_dim) for path in others) or _has_tensors(block):
        return {}
    inputs = _weight(own[rows[0]]).shape[1]
    outputs = {path.rpartition(".")[2]: _weight(own[path]).shape[0] for path in columns}
    if is_attention:
        return _divide_attention(name, rows[0], outputs, inputs, config)
    if hasattr(block, "layer_idx") or set(outputs.values()) != {inputs}:
        return {}
    layers = {path: DividedLinear(Division.COLUMN, inputs, False, 1) for path in columns}
    return layers | {rows[0]: DividedLinear(Division.ROW, inputs, False, num_segments_of(inputs, inputs))}


def _divide_attention(
    name: str, row: str, outputs: dict[str, int], inputs: int, config: Any
) -> dict[str, DividedLinear]:
    """Divide the heads of an attention; ``inputs`` are those of its output layer."""
    num_heads, num_kv_heads = int(config.num_attention_heads), _num_kv_heads(config)
    kv_size = inputs // num_heads * num_kv_heads
    if inputs % num_heads or outputs != {"q_proj": inputs, "k_proj": kv_size, "v_proj": kv_size}:
        return {}
    return {
        f"{name}.q_proj": DividedLinear(Division.COLUMN, num_heads, False, 1),
        f"{name}.k_proj": DividedLinear(Division.COLUMN, num_kv_heads, True, 1),
        f"{name}.v_proj": DividedLinear(Division.COLUMN, num_kv_heads, True, 1),
        row: DividedLinear(Division.ROW, num_heads, False, num_segments_of(inputs, num_heads)),
    }


def _is_alike(path: str, module: torch.nn.Module, styles: dict[str, str], head_dim: int) -> bool:
    """Return whether a module computes the same for some heads, or some values, as for all of them."""
    if isinstance(module, _ELEMENTWISE) and not _has_tensors(module):
        return True
    shapes = [tuple(each.shape) for each in module.parameters()]
    return styles.get(path) == _EACH_ALIKE and shapes == [(head_dim,)]


def _has_tensors(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters or buffers of its own."""
    return bool(module._parameters) or bool(module._buffers)


def _weight(linear: torch.nn.Module) -> torch.Tensor:
    return linear.get_parameter("weight")


def _num_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
