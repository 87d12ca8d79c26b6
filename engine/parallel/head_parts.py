"""Takes the part of a block that has some KV heads, and puts it back: arithmetic on a block's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from quire.engine.parallel.messages import Bytes
from quire.kvindex.kv_layout import KvShape


def part_shape(shape: KvShape, heads: range) -> KvShape:
    """Return the shape of the part with some heads of a block."""
    return replace(shape, num_kv_heads=len(heads))


def take_part(block: Bytes, shape: KvShape, heads: range) -> Bytes:
    """Return a copy of the part with some heads of a block; the part is laid out like a block of its own."""
    own = part_shape(shape, heads)
    part = np.zeros(own.block_bytes, np.uint8)
    for whole, piece in zip(_by_head(block, shape), _by_head(part, own), strict=True):
        piece[:] = whole[:, heads.start : heads.stop]
    return part


def put_part(block: Bytes, shape: KvShape, heads: range, part: Bytes) -> None:
    """Write the part with some heads into a block."""
    own = part_shape(shape, heads)
    for whole, piece in zip(_by_head(block, shape), _by_head(part, own), strict=True):
        whole[:, heads.start : heads.stop] = piece


def _by_head(block: Bytes, shape: KvShape) -> Iterator[Bytes]:
    """Yield a block's vectors, and its scales if it has any, as ``[2 * num_layers, num_kv_heads, …]``."""
    dimensions = (2 * shape.num_layers, shape.num_kv_heads, -1)
    yield block[: shape.vector_bytes].reshape(dimensions)
    if shape.is_quantized:
        yield block[shape.scales].reshape(dimensions)
