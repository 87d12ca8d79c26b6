"""Keys and values in 8 bits, with one scale per block, K or V, and KV head.

The token in slot 0 of a block sets the block's scale, alone: its largest magnitude times a headroom for the
tokens after it, which saturate beyond that. So the bytes of a block do not depend on how its tokens were
split into steps, and nothing is ever quantized twice: blocks with equal tokens are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class KvFormat(NamedTuple):
    """How 8-bit keys and values are stored.

    Attributes:
        name: what the kernels know the format by.
        largest: the largest magnitude that the format holds.
        headroom: how many times the largest magnitude of slot 0 fits into a block.
    """

    name: str
    largest: float
    headroom: float

    @property
    def scale_per_magnitude(self) -> float:
        """What a magnitude of slot 0 is multiplied by to give the block's scale."""
        return self.headroom / self.largest


LOWEST_MAGNITUDE = 1e-12
"""Stands for the largest magnitude of a slot 0 that is all zero."""

KV_FORMATS = {
    # A float pays for headroom only where small values become subnormal: the error, 2.6 %, is the same from
    # 16 to 256, and at 64 even if slot 0 is an attention sink with a tiny value vector.
    torch.float8_e4m3fn: KvFormat("e4m3", 448.0, 64.0),
    # An integer pays in full: 1.2 % at 2 if the vectors of a block are alike, 10 % if their lengths vary.
    torch.int8: KvFormat("int8", 127.0, 2.0),
}
