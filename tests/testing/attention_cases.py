"""Steps of attention with everything unused poisoned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from quire.kernels import reference
from quire.kernels.metadata import AttentionMetadata


class Case(NamedTuple):
    """One step's tensors."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_layer: torch.Tensor
    metadata: AttentionMetadata
    kv_scales: torch.Tensor | None = None
    latent_dim: int | None = None


def make_case(
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    block_size: int = 16,
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    latent_dim: int | None = None,
    num_shared_blocks: int = 0,
    seed: int = 0,
) -> Case:
    """Return sequences of (cached, new) tokens in shuffled blocks; all slots that no token owns hold NaN.

    The first sequence's first blocks are also those of all others whose cached tokens fill as many. With a
    ``latent_dim`` there should be one KV head.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-(cached + new) // block_size) for cached, new in lengths]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 1), 2**30, dtype=torch.int32)
    shape = (len(order), 3, 1 if latent_dim else 2, num_kv_heads, block_size, head_dim)
    kv_layer = torch.full(shape, float("nan")).to(stored or dtype)[:, 1]
    kv_scales = torch.full((len(order), 3, 2, num_kv_heads), float("nan"))[:, 1] if stored else None
    slots: list[int] = []
    for row, (cached, new) in enumerate(lengths):
        shared = tables[0, : num_shared_blocks if row and cached >= num_shared_blocks * block_size else 0]
        table = [*shared.tolist(), *(order.pop() for _ in range(num_blocks[row] - len(shared)))]
        tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        all_slots = [table[p // block_size] * block_size + p % block_size for p in range(cached + new)]
        past = torch.tensor(all_slots[:cached], dtype=torch.int64)
        rows = torch.randn((2, cached, num_kv_heads, head_dim), generator=generator).to(dtype)
        values = rows[0][..., :latent_dim] if latent_dim else rows[1]
        reference.write_kv(rows[0], values, kv_layer, past, kv_scales)
        slots += all_slots[cached:]
    new_tokens = [new for _, new in lengths]
    total = sum(new_tokens)
    metadata = AttentionMetadata(
        block_tables=tables,
        query_starts=torch.tensor([0, *np.cumsum(new_tokens)], dtype=torch.int32),
        seq_lens=torch.tensor([cached + new for cached, new in lengths], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
    query = torch.randn((total, num_kv_heads * group, head_dim), generator=generator).to(dtype)
    key, value = torch.randn((2, total, num_kv_heads, head_dim), generator=generator).to(dtype)
    # A rotated key may be much larger than the latent before it.
    if latent_dim:
        key[..., latent_dim:] *= 30
        query[..., latent_dim:] /= 30
        value = key[..., :latent_dim]
    return Case(query, key, value, kv_layer, metadata, kv_scales, latent_dim)
