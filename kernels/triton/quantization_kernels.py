"""8-bit keys and values on the device: the arithmetic behind ``quantization``."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels import quantization

LOWEST_MAGNITUDE = tl.constexpr(quantization.LOWEST_MAGNITUDE)


@triton.jit
def _round(x):
    """Round float32 of less than 2^22 to an integer, half to even: beyond 2^23 a float has no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _encode_e4m3(x):
    """Round float32 to e4m3, half to even and saturating, as bits in uint8: sm_80 has no such conversion."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    # 4 exponent bits of bias 7 instead of 8 of bias 127, 3 bits of mantissa instead of 23.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = _round(magnitude * 512.0).to(tl.uint32)
    return (tl.where(magnitude >= 0.015625, normal, subnormal) | sign).to(tl.uint8)


@triton.jit
def encode_values(x, KV_FORMAT: tl.constexpr):
    """Quantize float32 that is already divided by its scale."""
    if KV_FORMAT == "int8":
        return _round(tl.minimum(tl.maximum(x, -127.0), 127.0)).to(tl.int8)
    else:
        return _encode_e4m3(x)


@triton.jit
def decode_values(x, dtype: tl.constexpr, KV_FORMAT: tl.constexpr):
    """Return stored values in a dtype; each 8-bit value is exact in all of float16, bfloat16 and float32."""
    if KV_FORMAT == "e4m3":
        # Placed in a float16 the bits mean 2^-8 of the value.
        wide = x.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    elif KV_FORMAT == "int8":
        return x.to(tl.float32).to(dtype)
    else:
        return x
