"""The residual stream of a step: embeddings, what layers add to it, and its norms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import TILE_COLUMNS, exact, item_bytes, keep_apart, pointer, widen
from quire.kernels.cpu.products.read_weight import read_weight
from quire.kernels.cpu.products.stored_types import panel_bytes
from quire.kernels.cpu.rows import narrow
from quire.kernels.cpu.step.linear_layers import encode_rows
from quire.kernels.cpu.step.team import share
from quire.kernels.cpu.step.vectors import copy, normalize_row


@exact
def embed(args: Any, team: Any, storage: Any, stored: Any) -> None:
    """Write the embeddings of the tokens."""
    keep_apart()
    size, num_bytes = args.hidden_size, item_bytes(storage)
    first, end = share(args.num_tokens, team)
    token_ids = carray(pointer(args.token_ids, np.int64), (args.num_tokens,))
    positions = carray(pointer(args.positions, np.int64), (args.num_tokens,))
    for token in range(first, end):
        x = carray(pointer(args.hidden + 4 * token * size, np.float32), (size,))
        token_id = token_ids[token]
        if args.is_embedding_packed:
            panel_at = args.embedding + panel_bytes(size, stored) * (token_id // TILE_COLUMNS)
            for i in range(size):
                x[i] = narrow(read_weight(panel_at, i, token_id % TILE_COLUMNS, size, stored), storage)
        else:
            vector = carray(pointer(args.embedding + num_bytes * token_id * size, storage), (size,))
            for i in range(size):
                x[i] = widen(vector[i])
        if args.embedding_scale != 1.0:
            for i in range(size):
                x[i] = narrow(x[i] * np.float32(args.embedding_scale), storage)
        if args.position_embedding:
            row = positions[token] + args.position_offset
            added = carray(pointer(args.position_embedding + num_bytes * row * size, storage), (size,))
            for i in range(size):
                x[i] = narrow(x[i] + widen(added[i]), storage)


@exact
def normalize_rows(args: Any, norm: Any, team: Any, storage: Any, stored: Any) -> None:
    """Normalize the rows to ``normed``, and encode them for linear layers."""
    keep_apart()
    size = args.hidden_size
    first, end = share(args.num_tokens, team)
    for row in range(first, end):
        at = 4 * row * size
        normalize_row(norm, args.hidden + at, args.normed + at, size, storage)
        if norm.residual_scale != 0.0:
            x = carray(pointer(args.hidden + at, np.float32), (size,))
            normed = carray(pointer(args.normed + at, np.float32), (size,))
            for i in range(size):
                x[i] = narrow(normed[i] * np.float32(norm.residual_scale), storage)
    encode_rows(args, args.normed, size, team, stored)


@exact
def add_update(
    args: Any, scale: float, after_norm: Any, next_norm: Any, team: Any, storage: Any, stored: Any
) -> None:
    """Add a layer's output with a factor to the residual stream, and normalize the sum for the next layer."""
    keep_apart()
    size, stride = args.hidden_size, args.update_stride
    first, end = share(args.num_tokens, team)
    for row in range(first, end):
        update_at = args.update + 4 * row * stride
        if after_norm.kind != 0:
            normalize_row(after_norm, update_at, update_at, size, storage)
        x = carray(pointer(args.hidden + 4 * row * size, np.float32), (size,))
        update = carray(pointer(update_at, np.float32), (size,))
        if scale != 1.0:
            for i in range(size):
                update[i] = narrow(update[i] * np.float32(scale), storage)
        for i in range(size):
            x[i] = narrow(x[i] + update[i], storage)
    if next_norm.kind != 0:
        normalize_rows(args, next_norm, team, storage, stored)


@exact
def keep_rows(args: Any, kept: Any, attended_size: int, team: Any) -> None:
    """Copy the rows of the tokens that later phases compute."""
    keep_apart()
    rows = carray(pointer(kept.kept_rows, np.int64), (kept.num_tokens,))
    size = args.hidden_size
    first, end = share(kept.num_tokens, team)
    for index in range(first, end):
        row = rows[index]
        copy(args.hidden + 4 * row * size, kept.hidden + 4 * index * size, size)
        copy(
            args.attended + 4 * row * attended_size, kept.attended + 4 * index * attended_size, attended_size
        )
