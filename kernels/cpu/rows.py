"""Norms and activation functions, row by row, on the CPU.

The bits of a value do not depend on the rest of the step or on the processor. Sums run in a fixed order, and
exponentials, cosines and sines are implemented here: libraries compute the last values of an array
differently, and have separate code for each kind of processor.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import (
    STORAGE,
    encode,
    exact,
    exp,
    fetch_and_increment,
    keep_apart,
    multiply_add,
    pointer,
    widen,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.vector_loops import sum_powers
from quire.kernels.torch_functions import without_replacements

Array = np.ndarray[Any, np.dtype[Any]]

_MIN_THREADED_VALUES = 1 << 15
"""With fewer values than this, waking up threads costs more time than it saves."""


class Norm(IntEnum):
    """How a row is normalized: by its root mean square (RMS), or by its mean and variance (LAYER)."""

    NONE = 0
    RMS = 1
    """The row is rounded to the model's dtype before it is multiplied by the weight."""
    RMS_IN_FLOAT32 = 2
    """The row is multiplied by the weight first."""
    LAYER = 3


class Activation(IntEnum):
    """An elementwise function."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU = 4
    RELU_SQUARED = 5
    TANH = 6
    COSINE = 7
    SINE = 8
    SIGMOID = 9


@exact
def narrow(x: np.float32, storage: Any) -> np.float32:
    """Round a float32 to a stored type and back."""
    rounded: np.float32 = widen(encode(x, storage))
    return rounded


@exact
def normalize(
    kind: int,
    inputs: int,
    weight: int,
    bias: int,
    epsilon: float,
    outputs: int,
    length: int,
    storage: Any,
) -> None:
    """Normalize one row of ``length`` values; all but ``kind`` and ``epsilon`` are addresses of float32.

    Args:
        kind: a ``Norm``.
        inputs, outputs: addresses of the row before and after, which may be equal.
        weight, bias: factors and addends; the bias is used only by ``Norm.LAYER``.
        epsilon: float32, added to the variance.
        storage: NumPy type to which the result is rounded.
    """
    keep_apart()
    x = carray(pointer(inputs, np.float32), (length,))
    y = carray(pointer(outputs, np.float32), (length,))
    w = carray(pointer(weight, np.float32), (length,))
    one, count = np.float32(1.0), np.float32(length)
    if kind == 3:
        b = carray(pointer(bias, np.float32), (length,))
        mean = sum_powers(np.int64(inputs), np.int64(length), np.float32(0.0), 1) / count
        variance = sum_powers(np.int64(inputs), np.int64(length), mean, 2) / count
        factor = one / np.sqrt(variance + np.float32(epsilon))
        for i in range(length):
            y[i] = narrow((x[i] - mean) * factor * w[i] + b[i], storage)
        return
    square = sum_powers(np.int64(inputs), np.int64(length), np.float32(0.0), 2) / count
    factor = one / np.sqrt(square + np.float32(epsilon))
    if kind == 1:
        for i in range(length):
            y[i] = narrow(narrow(x[i] * factor, storage) * w[i], storage)
    else:
        for i in range(length):
            y[i] = narrow(x[i] * factor * w[i], storage)


@exact
def _tanh(x: np.float32) -> np.float32:
    """Return the hyperbolic tangent within 1e-7."""
    one, two = np.float32(1.0), np.float32(2.0)
    power = exp(-two * abs(x))
    size = one - two * power / (one + power)
    result: np.float32 = size if x >= np.float32(0.0) else -size
    return result


@exact
def _tanh_near_zero(x: np.float32) -> np.float32:
    """Return the hyperbolic tangent for magnitudes up to 0.625, to full precision (Cephes' ``tanhf``)."""
    square = x * x
    p = np.float32(-5.70498872745e-3)
    p = multiply_add(p, square, np.float32(2.06390887954e-2))
    p = multiply_add(p, square, np.float32(-5.37397155531e-2))
    p = multiply_add(p, square, np.float32(1.33314422036e-1))
    p = multiply_add(p, square, np.float32(-3.33332819422e-1))
    near: np.float32 = multiply_add(p * square, x, x)
    return near


@exact
def _cosine(x: np.float32, quarters: int) -> np.float32:
    """Return the cosine of ``x`` plus a number of quarters of a turn, for ``x`` up to a million.

    Full quarters of a turn are subtracted in two parts; the first part is exact. Taylor polynomials give the
    cosine and the sine of the remaining angle.
    """
    number = np.floor(np.float64(x) * 0.6366197723675814 + 0.5)
    rest = (np.float64(x) - number * 1.5707963267341256) - number * 6.077100506506192e-11
    square = rest * rest
    cosine = 2.08767569878681e-9 * square - 2.755731922398589e-7
    cosine = cosine * square + 2.48015873015873e-5
    cosine = cosine * square - 1.388888888888889e-3
    cosine = (cosine * square + 0.041666666666666664) * square - 0.5
    cosine = cosine * square + 1.0
    sine = 1.6059043836821613e-10 * square - 2.505210838544172e-8
    sine = sine * square + 2.7557319223985893e-6
    sine = sine * square - 1.984126984126984e-4
    sine = (sine * square + 0.008333333333333333) * square - 0.16666666666666666
    sine = (sine * square + 1.0) * rest
    quarter = np.int32(number) + np.int32(quarters)
    size = sine if quarter & 1 else cosine
    return np.float32(-size if (quarter + 1) & 2 else size)


@exact
def _erf(x: np.float32) -> np.float32:
    """Return the error function within 1.5e-7 (Abramowitz and Stegun, 1964, 7.1.26)."""
    one = np.float32(1.0)
    size = abs(x)
    t = one / (one + np.float32(0.3275911) * size)
    p = np.float32(1.061405429)
    p = p * t + np.float32(-1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t + np.float32(-0.284496736)
    p = p * t + np.float32(0.254829592)
    size = one - p * t * exp(-size * size)
    result: np.float32 = size if x >= np.float32(0.0) else -size
    return result


@exact
def activate(kind: int, values: int, length: int, storage: Any) -> None:
    """Apply an ``Activation`` to ``length`` float32 values at an address, rounded to a stored type."""
    keep_apart()
    x = carray(pointer(values, np.float32), (length,))
    zero, half, one = np.float32(0.0), np.float32(0.5), np.float32(1.0)
    if kind == 1:
        for i in range(length):
            small = exp(-abs(x[i]))
            x[i] = narrow(x[i] * (one if x[i] >= zero else small) / (one + small), storage)
    elif kind == 2:
        for i in range(length):
            inner = np.float32(0.7978845608028654) * (x[i] + np.float32(0.044715) * x[i] * x[i] * x[i])
            x[i] = narrow(half * x[i] * (one + _tanh(inner)), storage)
    elif kind == 3:
        for i in range(length):
            x[i] = narrow(half * x[i] * (one + _erf(x[i] * np.float32(0.7071067811865476))), storage)
    elif kind == 4:
        for i in range(length):
            x[i] = max(x[i], zero)
    elif kind == 5:
        for i in range(length):
            positive = max(x[i], zero)
            x[i] = narrow(positive * positive, storage)
    elif kind == 6:
        for i in range(length):
            is_near = abs(x[i]) < np.float32(0.625)
            x[i] = narrow(_tanh_near_zero(x[i]) if is_near else _tanh(x[i]), storage)
    elif kind == 7:
        for i in range(length):
            x[i] = narrow(_cosine(x[i], 0), storage)
    elif kind == 8:
        for i in range(length):
            x[i] = narrow(_cosine(x[i], 3), storage)
    elif kind == 9:
        for i in range(length):
            small = exp(-abs(x[i]))
            x[i] = narrow((one if x[i] >= zero else small) / (one + small), storage)


@exact
def _multiply(left: int, right: int, outputs: int, length: int) -> None:
    keep_apart()
    x, y = carray(pointer(left, np.float32), (length,)), carray(pointer(right, np.float32), (length,))
    products = carray(pointer(outputs, np.float32), (length,))
    for i in range(length):
        products[i] = x[i] * y[i]


_FIELDS = (
    *("inputs", "gates", "outputs", "weight", "bias", "next_row"),
    *("num_rows", "length", "input_stride", "gate_stride", "num_weight_rows"),
    *("norm", "activation", "gate_activation", "is_gated_first"),
)
ARGUMENTS = np.dtype([*((name, np.int64) for name in _FIELDS), ("epsilon", np.float64)])
"""The arguments of a kernel that normalizes rows; see ``norm``."""
_PACKED = Struct(f"{len(_FIELDS)}qd")


class Gate(NamedTuple):
    """Values by which a row is multiplied.

    Attributes:
        values: a tensor of the shape of the rows.
        activation: the function that is applied to them first, and whose result is rounded to their dtype.
        is_first: whether the row is multiplied before it is normalized, or after.
    """

    values: torch.Tensor
    activation: Activation
    is_first: bool = False


@without_replacements
def norm(
    inputs: torch.Tensor,
    kind: Norm,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    dtype: torch.dtype | None = None,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Normalize each row of ``[..., length]``.

    Args:
        weight: float32 ``[length]`` or ``[num_groups, length]``; then every ``num_groups`` rows belong
            together. None only if nothing is normalized.
        bias: float32 ``[length]``, or None.
        dtype: that to which a normalized row is rounded, the inputs' own by default.
        gate: what multiplies each row.

    Returns:
        A tensor of the dtype of the inputs.
    """
    dtype = dtype or inputs.dtype
    return _run(inputs, STORAGE[dtype], kind, weight, bias, epsilon, Activation.NONE, gate).to(inputs.dtype)


@without_replacements
def activation(inputs: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Apply an elementwise function to a tensor."""
    return _run(inputs, STORAGE[inputs.dtype], Norm.NONE, None, None, 0.0, kind, None).to(inputs.dtype)


def _run(
    inputs: torch.Tensor,
    storage: Any,
    kind: Norm,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    epsilon: float,
    function: Activation,
    gate: Gate | None,
) -> torch.Tensor:
    """Return float32 values of the shape of the inputs."""
    length = inputs.shape[-1]
    rows = _as_rows(inputs, length)
    gates = rows if gate is None else _as_rows(gate.values, length)
    outputs = torch.empty(inputs.shape)
    num_threads = torch.get_num_threads() if rows.numel() >= _MIN_THREADED_VALUES else 1
    counter = np.zeros(1, np.int64) if num_threads > 1 else None
    addresses = (
        rows.data_ptr(),
        0 if gate is None else gates.data_ptr(),
        outputs.data_ptr(),
        0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        0 if counter is None else counter.ctypes.data,
    )
    num_weight_rows = 1 if weight is None else weight.numel() // max(length, 1)
    sizes = (rows.shape[0], length, rows.stride(0), gates.stride(0), num_weight_rows)
    of_gate = (Activation.NONE, False) if gate is None else gate[1:]
    arguments = _PACKED.pack(*addresses, *sizes, kind, function, *of_gate, epsilon)
    address = kernel(storage, storage if gate is None else STORAGE[gate.values.dtype]).address
    threads.run(address, arguments, num_threads)
    return outputs


def _as_rows(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return float32 ``[num_rows, length]``, whose rows are contiguous."""
    rows = values.float().reshape(-1, length) if length else values.float().flatten()[:, None]
    return rows if rows.stride(1) == 1 else rows.contiguous()


@cache
def kernel(storage: Any, gate_storage: Any) -> Any:
    """Compile the function that each thread runs: it takes the next row until none is left."""

    def compute_rows(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        length, gates = args.length, np.empty(args.length, np.float32)
        gate, row = np.int64(gates.ctypes.data), np.int64(-1)
        while True:
            # One thread needs no counter.
            row = np.int64(fetch_and_increment(args.next_row)) if args.next_row != 0 else row + 1
            if row >= args.num_rows:
                break
            inputs = np.int64(args.inputs + 4 * row * args.input_stride)
            outputs = np.int64(args.outputs + 4 * row * length)
            if args.gates != 0:
                gates[:] = carray(pointer(args.gates + 4 * row * args.gate_stride, np.float32), (length,))
                activate(args.gate_activation, gate, length, gate_storage)
            if args.gates != 0 and args.is_gated_first:
                _multiply(inputs, gate, outputs, length)
                inputs = outputs
            if args.norm != 0:
                weight = args.weight + 4 * (row % args.num_weight_rows) * length
                normalize(args.norm, inputs, weight, args.bias, args.epsilon, outputs, length, storage)
                inputs = outputs
            if args.gates != 0 and not args.is_gated_first:
                _multiply(inputs, gate, outputs, length)
            elif inputs != outputs:
                carray(pointer(outputs, np.float32), (length,))[:] = carray(
                    pointer(inputs, np.float32), (length,)
                )
            activate(args.activation, outputs, length, storage)

    return compile_kernel(ARGUMENTS, compute_rows)
