"""The layout of a KV block: its shape, its bytes, and the model that computed its values.

The engine allocates blocks by it, both ends of a transfer compare it before any byte moves, and block hashes
are rooted in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cache

LAYOUT_VERSION = 1
"""Version of the order of values within a block; raise it when older blocks can no longer be read."""

MAX_UNUSED_SHARE = 1 / 16
"""Most unused layers of a block with two parts, as a share of its layers."""

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

    If some layers have a window and others see all tokens, a block is a number of frames, each with layers of
    one of the two groups: first the frames of the layers that see all tokens, which are its *lasting* part,
    and then those of the layers with a window, its *window part*. Unused layers may follow the last one. A
    block without the second part is *bare*: it is behind the windows of all sequences that read it.

    ::

        10 layers, of which 2 see all tokens      [ a b | c d | e f | g h | i j ]      5 frames of 2 layers
        the same block when it is bare            [ a b ]

    Attributes:
        dtype: torch's name of the type of the stored values, such as "bfloat16".
        latent_dim: elements of a latent, the first of the ``head_dim`` elements of a row; 0 if layers keep
            keys and values.
        window: how many tokens the layers with a window see, including their own token; 0 if a block has one
            part.
        window_layers: numbers of these layers.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    latent_dim: int = field(default=0, kw_only=True)
    window: int = field(default=0, kw_only=True)
    window_layers: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def num_parts(self) -> int:
        """Number of vectors that a KV head keeps of a token: a key and a value, or one row with a latent."""
        return 1 if self.latent_dim else 2

    @property
    def is_quantized(self) -> bool:
        """Whether blocks are stored in 8 bits and have scales."""
        return _ITEM_BYTES[self.dtype] == 1

    @property
    def frame(self) -> KvShape:
        """The shape of one frame of a block, which is a block of its own; the same shape if there is one."""
        return self if not self.window else _frame_of(self)

    @property
    def flat(self) -> KvShape:
        """The shape of a block of these layers with one part."""
        return self._with(window=0, window_layers=())

    @property
    def lasting_frames(self) -> int:
        """How many frames a bare block has."""
        return (self.num_layers - len(self.window_layers)) // self.frame.num_layers

    @property
    def num_frames(self) -> int:
        """How many frames a block has."""
        return self.lasting_frames + -(-len(self.window_layers) // self.frame.num_layers)

    @property
    def layer_places(self) -> list[tuple[int, int]]:
        """For each layer, its frame in a block, and its place among the frame's layers."""
        lasting = [layer for layer in range(self.num_layers) if layer not in self.window_layers]
        places = {layer: at for at, layer in enumerate((*lasting, *self.window_layers))}
        return [divmod(places[layer], self.frame.num_layers) for layer in range(self.num_layers)]

    @property
    def window_blocks(self) -> int:
        """How many blocks before a block boundary the next token sees, if there are so many."""
        return -(-(self.window - 1) // self.block_size) if self.window else 0

    def num_bare(self, num_blocks: int) -> int:
        """Return how many of the blocks of a prefix are bare if a sequence only goes on after it."""
        return max(0, num_blocks - self.window_blocks) if self.window else 0

    def first_seen_block(self, position: int) -> int:
        """Return the index of the first block that a token at ``position`` sees in all layers."""
        return max(0, position + 1 - self.window) // self.block_size if self.window else 0

    def most_tokens(self, num_blocks: int) -> int:
        """Return how many tokens of one sequence memory for ``num_blocks`` whole blocks holds."""
        num_whole = min(num_blocks, self.window_blocks + 2) if self.window else num_blocks
        num_bare = (num_blocks - num_whole) * self.num_frames // self.lasting_frames
        return (num_whole + num_bare) * self.block_size

    @property
    def payload_sizes(self) -> tuple[int, ...]:
        """Bytes of a block; if there are bare blocks, also of a bare one and of a frame."""
        if not self.window:
            return (self.block_bytes,)
        return self.block_bytes, self.bare_bytes, self.frame.block_bytes

    @property
    def bare_bytes(self) -> int:
        """Bytes of a bare block."""
        return self.lasting_frames * self.frame.block_bytes

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
        if self.window:
            return self.num_frames * self.frame.block_bytes
        return _aligned(self.scales.stop) if self.is_quantized else self.vector_bytes

    def _with(self, **changes: object) -> KvShape:
        values = {each.name: getattr(self, each.name) for each in fields(KvShape)}
        return KvShape(**{**values, **changes})


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
        described = {**asdict(self), "layout_version": LAYOUT_VERSION}
        for name in ("latent_dim", "window", "window_layers"):
            if not described[name]:
                del described[name]
        return json.dumps(described, sort_keys=True, separators=(",", ":")).encode()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@cache
def _frame_of(shape: KvShape) -> KvShape:
    """Return the shape of the frames of a block with two parts.

    The layers that see all tokens fill whole frames, since a long sequence has many of them. The others may
    leave room for a few unused layers, since small frames make long block tables.
    """
    num_window = len(shape.window_layers)
    num_lasting = shape.num_layers - num_window
    num_layers = next(
        size
        for size in range(num_lasting, 0, -1)
        if num_lasting % size == 0 and -num_window % size <= MAX_UNUSED_SHARE * shape.num_layers
    )
    return shape.flat._with(num_layers=num_layers)
