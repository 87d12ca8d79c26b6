"""The layout of a KV block: its shape, its bytes, and the model that computed its values.

The engine allocates blocks by it, both ends of a transfer compare it before any byte moves, and block hashes
are rooted in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

LAYOUT_VERSION = 1
"""Version of the order of values within a block; raise it when older blocks can no longer be read."""

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_SCALE_BYTES = 4
_ALIGNMENT = 16
"""Blocks begin at multiples of this many bytes, since GPUs copy them as words of 16 bytes."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The shape of one block, ``[num_layers, num_parts, num_kv_heads, block_size, head_dim]``.

    A block contains the keys and values of all layers for ``block_size`` tokens: two parts, K and V. With
    latent attention there is one part, whose rows have no head: a latent, which is also the value, and after
    it the rotated key that all heads share.

    8-bit blocks (``quire.kernels.quantization``) end with their scales: one float32 for each combination of
    layer, K or V, and KV head; with latent attention, for each layer's latents and rotated keys.

    Attributes:
        dtype: torch's name of the type of the stored values, such as "bfloat16".
        latent_dim: elements of a latent, the first of the ``head_dim`` elements of a row; 0 if layers keep
            keys and values.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    latent_dim: int = field(default=0, kw_only=True)

    @property
    def num_parts(self) -> int:
        """Number of vectors that a KV head keeps of a token: a key and a value, or one row with a latent."""
        return 1 if self.latent_dim else 2

    @property
    def is_quantized(self) -> bool:
        """Whether blocks are stored in 8 bits and have scales."""
        return _ITEM_BYTES[self.dtype] == 1

    @property
    def vector_bytes(self) -> int:
        """Bytes of a block's keys and values, without scales and padding."""
        num_elements = self.num_layers * self.num_parts * self.num_kv_heads * self.block_size * self.head_dim
        return num_elements * _ITEM_BYTES[self.dtype]

    @property
    def num_scales(self) -> int:
        """Number of scales of a block."""
        return self.num_layers * 2 * self.num_kv_heads if self.is_quantized else 0

    @property
    def scales(self) -> slice:
        """The bytes of a block that are its scales."""
        start = _aligned(self.vector_bytes) if self.is_quantized else self.vector_bytes
        return slice(start, start + self.num_scales * _SCALE_BYTES)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, with scales and padding."""
        return _aligned(self.scales.stop) if self.is_quantized else self.vector_bytes


@dataclass(frozen=True, slots=True)
class KvLayout(KvShape):
    """The shape of a block and the origin of its values: what workers must share to exchange blocks.

    Attributes:
        model_digest: digest of the model's configuration and weights.
        compute_dtype: the type that the model computes in.
        arithmetic: names the sums that computed the values; see ``quire.engine.model.arithmetic``.
    """

    model_digest: str
    compute_dtype: str
    arithmetic: str

    def descriptor(self) -> bytes:
        """Return the canonical JSON that block hashes are rooted in."""
        fields = {**asdict(self), "layout_version": LAYOUT_VERSION}
        if not self.latent_dim:
            del fields["latent_dim"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
