"""Reads from a model's own plan which of its linear layers can be divided among processes, and its experts.

transformers names a style for the layers of most architectures (``base_model_tp_plan``). A block of layers,
such as an attention or an MLP, is divided only if its linear layers are all "colwise" or "rowwise" and
nothing in it needs the values of all processes. Each process computes every other block as a whole. The plans
of some architectures would gather values within a block, but on one machine that costs more than it saves.

Experts need no plan: whichever transformers calls through its experts interface are divided as a whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from quire.engine.model.parallel_shares import DividedExperts, Shares
from quire.kernels.cpu.products.unit_product import num_segments_of
from quire.settings.setting import SettingError

_COLUMN, _ROW = "colwise", "rowwise"
_ELEMENTWISE = (
    torch.nn.Dropout,
    torch.nn.Identity,
    *{kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()},
)
_SHARED = re.compile(r"\.shared_experts?(?=\.)")
"""Place of the experts that each token uses. Most plans name only the same MLP in layers without experts."""
_EACH_ALIKE = "replicated_with_grad_allreduce"
"""Style of norms that each process applies to its own heads."""


class Division(Enum):
    """How a linear layer is divided: by its outputs, or by its inputs.

    The latter needs a sum over all processes.
    """

    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True)
class DividedLinear:
    """A linear layer that can be divided.

    Attributes:
        size: number of outputs or inputs, whichever are divided.
        is_key_value: whether its outputs are keys or values.
        shares: how the attention or MLP that it belongs to is divided.
    """

    division: Division
    size: int
    is_key_value: bool
    shares: Shares

    def own(self, rank: int, num_ranks: int) -> slice:
        """Return a rank's part of the outputs or inputs."""
        if not self.is_key_value:
            return self.shares.own(self.size, rank, num_ranks)
        heads, head_dim = self.shares.own_kv_heads(rank, num_ranks), self.size // self.shares.num_kv_heads
        return slice(heads.start * head_dim, heads.stop * head_dim)


@dataclass(frozen=True)
class ParallelPlan:
    """The layers of a model that can be divided.

    Attributes:
        linears: the layers by their full names; each process computes all others as a whole.
        attention: the shares of each attention; None if attention is not divided.
        experts: the experts by the full names of their modules.
    """

    linears: dict[str, DividedLinear]
    attention: Shares | None
    experts: dict[str, DividedExperts]

    def num_segments(self, rank: int, num_ranks: int) -> dict[str, int]:
        """Return a rank's number of input segments, for each layer that is divided by its inputs."""
        found = {}
        for name, each in self.linears.items():
            if each.division is Division.ROW:
                first, end = each.shares.borders(num_ranks)[rank : rank + 2]
                found[name] = end - first
        return found

    def check(self, num_ranks: int) -> None:
        """Raise SettingError if the model cannot be divided among this many processes."""
        problem = self._problem(num_ranks)
        if problem is not None:
            raise SettingError(
                f"the model cannot be divided among {num_ranks} processes: {problem}; "
                "choose another tensor-parallel size, or 1"
            )

    def _problem(self, num_ranks: int) -> str | None:
        if not self.linears and not self.experts:
            return "its architecture has no plan to divide its layers"
        for name, each in self.linears.items():
            problem = each.shares.problem(num_ranks)
            if problem is not None and each.division is Division.ROW:
                return f"{name}: {problem}"
        for name, experts in self.experts.items():
            if problem := experts.problem(num_ranks):
                return f"{name}: {problem}"
        return None


def read_plan(model: PreTrainedModel) -> ParallelPlan:
    """Return the plan of a model whose linear layers are torch's; it may be on the meta device."""
    config = model.config.get_text_config()
    styles = _styles(model, config)
    linears: dict[str, DividedLinear] = {}
    for name, block in model.named_modules():
        linears |= _divide_block(name, block, styles, config)
    attention = next((each.shares for each in linears.values() if each.is_key_value), None)
    experts = {
        name: DividedExperts(module.num_experts)
        for name, module in model.named_modules()
        if hasattr(module, "has_post_expert_norm")
    }
    return ParallelPlan(linears, attention, experts)


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
        if pattern.fullmatch(name) or pattern.fullmatch(_SHARED.sub("", name))
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
    shares = Shares(num_segments_of(inputs, inputs))
    layers = {path: DividedLinear(Division.COLUMN, inputs, False, shares) for path in columns}
    return layers | {rows[0]: DividedLinear(Division.ROW, inputs, False, shares)}


def _divide_attention(
    name: str, row: str, outputs: dict[str, int], inputs: int, config: Any
) -> dict[str, DividedLinear]:
    """Divide the heads of an attention; ``inputs`` are those of its output layer."""
    num_heads, num_kv_heads = int(config.num_attention_heads), _num_kv_heads(config)
    kv_size = inputs // num_heads * num_kv_heads
    if inputs % num_heads or outputs != {"q_proj": inputs, "k_proj": kv_size, "v_proj": kv_size}:
        return {}
    shares = Shares(num_segments_of(inputs, num_heads), num_heads, num_kv_heads)
    return {
        f"{name}.q_proj": DividedLinear(Division.COLUMN, inputs, False, shares),
        f"{name}.k_proj": DividedLinear(Division.COLUMN, kv_size, True, shares),
        f"{name}.v_proj": DividedLinear(Division.COLUMN, kv_size, True, shares),
        row: DividedLinear(Division.ROW, inputs, False, shares),
    }


def _is_alike(path: str, module: torch.nn.Module, styles: dict[str, str], head_dim: int) -> bool:
    """Return whether a module treats each head, or each value, independently of the others."""
    if isinstance(module, _ELEMENTWISE) and not _has_tensors(module):
        return True
    shapes = [tuple(each.shape) for each in module.parameters()]
    return styles.get(path) == _EACH_ALIKE and shapes == [(head_dim,)]


def _has_tensors(module: torch.nn.Module) -> bool:
    """Return whether a module itself has parameters or buffers."""
    return bool(module._parameters) or bool(module._buffers)


def _weight(linear: torch.nn.Module) -> torch.Tensor:
    return linear.get_parameter("weight")


def _num_kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
