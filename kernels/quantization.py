"""Keys and values in 8 bits, with one scale per block, K or V, and KV head.

Only the token in slot 0 of a block sets the block's scale. The scale covers this token's largest magnitude
times a headroom. Larger values of later tokens saturate. The bytes of a block therefore do not depend on how
its tokens were split into steps, and no value is quantized twice: blocks with the same tokens after the same
prefix have the same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KvFormat(NamedTuple):
    """How 8-bit keys and values are stored.

    Attributes:
        name: the name of the format in the kernels.
        largest: the largest magnitude that the format can represent.
        headroom: the largest magnitude in a block without saturation, as a multiple of slot 0's.
    """

    name: str
    largest: float
    headroom: float

    @property
    def scale_per_magnitude(self) -> float:
        """Factor from the largest magnitude of slot 0 to the block's scale."""
        return self.headroom / self.largest


LOWEST_MAGNITUDE = 1e-12
"""Lower bound of slot 0's largest magnitude, so that a slot of zeros gives a positive scale."""

KV_FORMATS = {
    # For a float, headroom costs accuracy only where small values become subnormal. The error is 2.6 % for
    # every headroom from 16 to 256. At 64 it is the same even if slot 0 is an attention sink with a tiny
    # value vector.
    torch.float8_e4m3fn: KvFormat("e4m3", 448.0, 64.0),
    # For an integer, headroom costs accuracy for all values. At a headroom of 2 the error is 1.2 % if the
    # vectors of a block have similar lengths, and 10 % if their lengths vary.
    torch.int8: KvFormat("int8", 127.0, 2.0),
}
