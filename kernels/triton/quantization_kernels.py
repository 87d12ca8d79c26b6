"""Conversion to and from 8-bit keys and values on the GPU, in the formats of ``quantization``."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import quantization

LOWEST_MAGNITUDE = tl.constexpr(quantization.LOWEST_MAGNITUDE)


@triton.jit
def _round(x):
    """Round float32 below 2^22 to an integer, half to even, by adding a number above 2^23.

    A float32 of that size has no fraction.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _encode_e4m3(x):
    """Round float32 to e4m3 bits in uint8, half to even and saturating; sm_80 has no such instruction."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # e4m3 has 4 exponent bits with bias 7 (float32: 8 with bias 127) and 3 mantissa bits (float32: 23).
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = _round(magnitude * 512.0).to(tl.uint32)
    return (tl.where(magnitude >= 0.015625, normal, subnormal) | sign).to(tl.uint8)


@triton.jit
def encode_values(x, KV_FORMAT: tl.constexpr):
    """Convert float32 values, which are already divided by their scale, to the stored format."""
    if KV_FORMAT == "int8":
        return _round(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8)
    else:
        return _encode_e4m3(x)


@triton.jit
def decode_values(x, dtype: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Convert stored values to a dtype; float16, bfloat16 and float32 represent all 8-bit values exactly."""
    if KV_FORMAT == "e4m3":
        # After sign extension and a shift, the byte's sign is in the float's sign bit and in the bits below,
        # which the mask clears. The exponents' biases differ by 8 and by 120.
        signed = x.to(tl.int8, bitcast=True)
        if dtype == tl.float16:
            half = (signed.to(tl.int16) << 7) & -0x4080
            return half.to(tl.float16, bitcast=True) * 256.0
        else:
            single = (signed.to(tl.int32) << 20) & -0x78100000
            return (single.to(tl.float32, bitcast=True) * 1.329227995784915872903807060280344576e36).to(dtype)
    elif KV_FORMAT == "int8":
        return x.to(tl.float32).to(dtype)
    else:
        return x
