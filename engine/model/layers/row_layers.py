"""Batch-invariant norms and other functions on the CPU: a token gets the same bits in any batch.

The common functions are kernels that compute all rows in the same way. The others are torch's. torch splits a
tensor into pieces, one per thread, and computes each piece in vectors. It computes the remaining values at
the end of a piece one by one, with another exponential function whose last bit differs. A token's keys would
therefore depend on the number of tokens in the step, and rounding to 8 bits makes the difference visible.
Here each piece is a multiple of the vector length, so no values remain.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from math import lcm
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS

from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.layers.routers import Route, softmax_route, ungrouped_route
from quire.kernels.cpu import rows
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.rows import Activation, Norm

_UNDIVIDED = 1 << 14
"""torch never divides this many values, or fewer, among threads."""
_PIECE = 1 << 15
"""Values per thread. With more, most functions use another thread; GELU always uses all threads."""
_STRIDE_BYTES = 128
"""Bytes that torch's loops process at a time: two vectors of at most 64 bytes each."""

_KINDS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})

ACTIVATIONS = {
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
    "GELUActivation": Activation.GELU,
    "ReLU": Activation.RELU,
    "ReLUSquaredActivation": Activation.RELU_SQUARED,
}
"""The kernel that replaces the modules of a class."""
_FUNCTIONS = {
    torch.tanh: Activation.TANH,
    torch.Tensor.tanh: Activation.TANH,
    torch.cos: Activation.COSINE,
    torch.Tensor.cos: Activation.COSINE,
    torch.sin: Activation.SINE,
    torch.Tensor.sin: Activation.SINE,
    torch.sigmoid: Activation.SIGMOID,
    torch.Tensor.sigmoid: Activation.SIGMOID,
    torch.nn.functional.silu: Activation.SILU,
}
"""The kernel that replaces a torch function whose bits depend on the processor or on other rows."""
_NAMES = {"linear", "polar", *(function.__name__ for function in _FUNCTIONS)}
_CONVERSIONS = (torch.Tensor.float, torch.Tensor.to, torch.Tensor.type)
_REPLACED = {*_FUNCTIONS, *_CONVERSIONS, torch.polar, torch.Tensor.__rpow__, torch.nn.functional.linear}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of a layer from the one that it replaces, relative to the largest value."""
AnyNorm = TypeVar("AnyNorm", bound=torch.nn.Module)


class KernelActivation(torch.nn.Module):
    """An activation function that a kernel computes."""

    def __init__(self, kind: Activation) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the function's value for each value."""
        return rows.activation(inputs, self.kind)


class RowNorm(torch.nn.Module):
    """A norm that a kernel computes.

    Attributes:
        kind: which norm it is.
        weight: in the model's dtype, to which the results are rounded.
        weight32, bias32: float32 ``[length]``; only layer norms have a bias.
        epsilon: added to the variance.
    """

    def __init__(
        self,
        kind: Norm,
        weight: torch.Tensor,
        weight32: torch.Tensor,
        bias32: torch.Tensor | None,
        epsilon: float,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        self.weight32 = weight32.detach().float().contiguous()
        self.bias32 = None if bias32 is None else bias32.detach().float().contiguous()
        self.epsilon = epsilon

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize each row of ``[..., length]``."""
        return rows.norm(inputs, self.kind, self.weight32, self.bias32, self.epsilon)


class PlainRowNorm(torch.nn.Module):
    """An RMS norm without a weight, for rows of any length."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalize each row of ``[..., length]``."""
        ones = torch.ones(inputs.shape[-1])
        return rows.norm(inputs, Norm.RMS_IN_FLOAT32, ones, None, self.epsilon)


class RowActivation(torch.nn.Module):
    """Applies an elementwise function, in pieces of whole vectors."""

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self._function = function

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the function's value for each value of ``[..., num_features]``, in the same shape."""
        stride = _STRIDE_BYTES // inputs.itemsize
        num_features = inputs.shape[-1]
        if num_features % stride:
            padded = torch.nn.functional.pad(inputs, (0, -num_features % stride))
            return self.forward(padded)[..., :num_features]
        num_even = _most_even(inputs.numel(), stride)
        if num_even == inputs.numel():
            output: torch.Tensor = self._function(inputs)
            return output
        values = inputs.reshape(-1)
        parts = [values[:num_even], *torch.split(values[num_even:], _UNDIVIDED)]
        return torch.cat([self._function(part) for part in parts]).view(inputs.shape)


def _most_even(num_values: int, stride: int) -> int:
    """Return how many leading values can be divided among threads in whole strides."""
    num_threads = torch.get_num_threads()
    while num_values > _UNDIVIDED:
        num_pieces = min(num_threads, -(-num_values // _PIECE))
        excess = num_values % (stride * lcm(num_pieces, num_threads))
        if not excess:
            break
        num_values -= excess
    return num_values


class KernelFunctions(TorchFunctionMode):
    """Replaces torch functions whose bits depend on the processor or on other rows."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _FUNCTIONS and args[0].is_cpu:
            return rows.activation(args[0], _FUNCTIONS[function])
        if function is torch.polar and args[0].is_cpu:
            sizes, angles = args
            return torch.complex(sizes * torch.cos(angles), sizes * torch.sin(angles))
        if function is torch.Tensor.__rpow__ and args[0].is_cpu and args[0].is_floating_point():
            return _powers(*args)
        return function(*args, **(kwargs or {}))


def _powers(exponents: torch.Tensor, base: float) -> torch.Tensor:
    """Raise a number to the power of each exponent, as for the frequencies of a rotation."""
    powers = [float(Decimal(base) ** Decimal(each)) for each in exponents.flatten().tolist()]
    return torch.tensor(powers, dtype=exponents.dtype).view(exponents.shape)


class ModuleFunctions(KernelFunctions):
    """Replaces torch functions in a module, also linear layers whose weight is a parameter of the module.

    Such a weight is converted and packed only once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._own = {each.untyped_storage().data_ptr() for each in module.parameters(recurse=False)}
        self._converted: dict[tuple[Any, ...], torch.Tensor] = {}
        self._layers: dict[tuple[int, torch.Size], PackedLinear] = {}

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _REPLACED:
            return function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear and args[0].is_cpu and args[0].dtype in _DTYPES:
            return self._linear(*args, **(kwargs or {}))
        if function in _CONVERSIONS and not kwargs and self._is_own(args[0]):
            key = function, args[0].data_ptr(), args[0].shape, *args[1:]
            if key not in self._converted:
                self._converted[key] = function(*args)
                self._own.add(self._converted[key].untyped_storage().data_ptr())
            return self._converted[key]
        return super().__torch_function__(function, types, args, kwargs)

    def _linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        key = weight.data_ptr(), weight.shape
        layer = self._layers.get(key)
        if layer is None:
            layer = PackedLinear(pack(weight), bias)
            if self._is_own(weight):
                self._layers[key] = layer
        output: torch.Tensor = layer(inputs)
        return output

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._own


def _use_kernel_functions(module: torch.nn.Module) -> None:
    """Make a module compute with kernels instead of torch's functions.

    Of the code of experts, only their gate runs.
    """
    name, functions = "_apply_gate" if hasattr(module, "_apply_gate") else "forward", ModuleFunctions(module)
    method = getattr(module, name)

    @wraps(method)
    def with_kernels(*args: Any, **kwargs: Any) -> Any:
        with functions:
            return method(*args, **kwargs)

    setattr(module, name, with_kernels)


def _calls_replaced_functions(kind: type[torch.nn.Module]) -> bool:
    """Return whether the code of a module, which is none of quire's, names functions that kernels replace."""
    if kind.__module__.startswith("quire."):
        return False
    methods = [each for base in kind.__mro__ for each in vars(base).values() if inspect.isfunction(each)]
    return any(_NAMES & set(inspect.unwrap(each).__code__.co_names) for each in methods)


def make_batch_invariant(model: torch.nn.Module) -> None:
    """Replace the norms and functions of a model on the CPU."""
    for parent in list(model.modules()):
        if (route := _route(parent)) is not None:
            parent.forward = route
        elif _calls_replaced_functions(type(parent)):
            _use_kernel_functions(parent)
        for name, child in list(parent.named_children()):
            if (norm := _row_norm(child)) is not None:
                setattr(parent, name, norm)
            elif type(child).__name__ in ACTIVATIONS and type(child) in _KINDS:
                setattr(parent, name, KernelActivation(ACTIVATIONS[type(child).__name__]))
            elif type(child) in _KINDS:
                setattr(parent, name, RowActivation(child))


@torch.inference_mode()
def _route(module: torch.nn.Module) -> Route | None:
    """Return a router's function with fewer operators, if it gives the bits of the router."""
    route = ungrouped_route(module) or softmax_route(module)
    if route is None:
        return None
    weight = module.get_parameter("weight")
    inputs = torch.randn((64, weight.shape[1]), generator=torch.Generator().manual_seed(1)).to(weight.dtype)
    with ModuleFunctions(module):
        mine, own = route(inputs), module(inputs)
    is_alike = len(mine) == len(own) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, own, strict=True)
    )
    return route if is_alike else None


def _row_norm(module: torch.nn.Module) -> RowNorm | PlainRowNorm | None:
    """Return the kernel's norm that is equivalent to a module; None if there is none."""
    if type(module) is torch.nn.LayerNorm and len(module.normalized_shape) == 1:
        length = module.normalized_shape[0]
        ones = torch.ones(length) if module.weight is None else module.weight
        zeros = torch.zeros(length) if module.bias is None else module.bias
        return RowNorm(Norm.LAYER, ones, ones, zeros, module.eps)
    return _plain_norm(module) or find_rms_norm(module, _rms_norm)


def _plain_norm(module: torch.nn.Module) -> PlainRowNorm | None:
    """Return the kernel's norm that is equivalent to a norm without a weight; None if there is none."""
    epsilon = getattr(module, "eps", None)
    has_name = type(module).__name__.endswith(("L2Norm", "RMSNorm"))
    if not has_name or epsilon is None or module.state_dict():
        return None
    norm, shape = PlainRowNorm(epsilon), getattr(module, "normalized_shape", (64,))
    with torch.inference_mode():
        inputs = torch.randn((8, *shape), generator=torch.Generator().manual_seed(1)) * 3
        expected = module(inputs)
        is_equal = (norm(inputs) - expected).abs().max() <= TOLERANCES[torch.float32] * expected.abs().max()
    return norm if is_equal else None


def _rms_norm(weight: torch.Tensor, shift: float, epsilon: float, kind: Norm) -> RowNorm:
    return RowNorm(kind, weight, weight.float() + shift, None, epsilon)


def find_rms_norm(
    module: torch.nn.Module, make: Callable[[torch.Tensor, float, float, Norm], AnyNorm]
) -> AnyNorm | None:
    """Return the RMS norm that agrees best with a module; None if the module is none, or if none agrees.

    Models differ in whether they round before they multiply by the weight, and in whether the weight is
    stored as its difference from 1.

    Args:
        make: makes a norm of a weight, what is added to it, epsilon, and ``Norm.RMS`` or ``RMS_IN_FLOAT32``.
    """
    if not type(module).__name__.endswith("RMSNorm"):
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter):
        return None
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    takes_one_input = len(inspect.signature(module.forward).parameters) == 1
    if epsilon is None or not takes_one_input or weight.dim() != 1 or weight.dtype not in _DTYPES:
        return None
    generator = torch.Generator().manual_seed(1)
    inputs = (torch.randn((8, len(weight)), generator=generator) * 3).to(weight.device, weight.dtype)
    with torch.inference_mode():
        expected = module(inputs).float()
        errors = {}
        for kind in (Norm.RMS, Norm.RMS_IN_FLOAT32):
            for shift in (0.0, 1.0):
                norm = make(weight, shift, epsilon, kind)
                errors[norm] = float((norm(inputs).float() - expected).abs().sum())
        best = min(errors, key=lambda norm: errors[norm])
        difference = (best(inputs).float() - expected).abs().max()
    return best if difference <= TOLERANCES[weight.dtype] * expected.abs().max() else None
