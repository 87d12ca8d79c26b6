"""The instruction ``tdpbf16ps`` in exact arithmetic, as Intel's manual defines it."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

_LEAST, _END = Fraction(2) ** -126, Fraction(2) ** 128
"""The smallest normal float32, and the first power of two that is too large."""


def tile_product(total: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``total + inputs @ weight.T``, 32 inputs at a time.

    Args:
        total: float32 ``[rows, columns]``.
        inputs: bfloat16 ``[rows, in_features]``.
        weight: bfloat16 ``[columns, in_features]``.
    """
    result = torch.empty_like(total)
    for row, values in enumerate(inputs.float().tolist()):
        for column, weights in enumerate(weight.float().tolist()):
            value = _flush(float(total[row, column]))
            for block in range(0, len(values), 32):
                chains = [0.0, 0.0]
                for index in range(block, block + 32):
                    chains[index % 2] = fused(values[index], weights[index], chains[index % 2])
                value = add(value, add(*chains))
            result[row, column] = value
    return result


def add(left: float, right: float) -> float:
    """Return the sum of two float32."""
    return fused(left, 1.0, right)


def fused(left: float, right: float, addend: float) -> float:
    """Return ``left * right + addend`` of float32, rounded once; denormal numbers are zero."""
    left, right, addend = _flush(left), _flush(right), _flush(addend)
    if not all(map(math.isfinite, (left, right, addend))):
        return _with_infinity(left, right, addend)
    exact = Fraction(left) * Fraction(right) + Fraction(addend)
    if exact == 0:
        # The product of two normal float32 is not zero as a Python float either.
        return left * right + addend if addend == 0 else 0.0
    return _nearest(exact)


def _with_infinity(left: float, right: float, addend: float) -> float:
    if math.isfinite(left) and math.isfinite(right):
        return addend
    return left * right + addend


def _nearest(exact: Fraction) -> float:
    """Return the nearest float32 of a number that is not zero, half to even."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(size / unit) * unit
    nearest = 0.0 if rounded < _LEAST else math.inf if rounded >= _END else float(rounded)
    return math.copysign(nearest, exact)


def _flush(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < _LEAST else value
