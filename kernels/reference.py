"""Slow and simple paged attention in float64, which tests compare the fast kernels with."""

from __future__ import annotations

import torch

from quire.kernels.metadata import AttentionMetadata
from quire.kernels.quantization import KV_FORMATS, LOWEST_MAGNITUDE


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in float64; see ``ops.paged_attention``."""
    output = torch.empty_like(query)
    block_size = kv_layer.shape[3]
    group = query.shape[1] // kv_layer.shape[2]
    starts = metadata.query_starts.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        block_ids = metadata.block_tables[row, : -(-seq_len // block_size)].long()
        # [num_blocks, 2, heads, block_size, head_dim] -> [2, heads, tokens, head_dim]
        stored = kv_layer[block_ids].double()
        if kv_scales is not None:
            stored *= kv_scales[block_ids][..., None, None]
        blocks = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
        keys, values = blocks.repeat_interleave(group, dim=1)
        scores = query[first:last].transpose(0, 1).double() @ keys.transpose(1, 2) * scale
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        position = torch.arange(seq_len - (last - first), seq_len)[:, None]
        key_position = torch.arange(seq_len)[None, :]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.double()[:, None, None] * (key_position - position)
        hidden = key_position > position
        if sliding_window is not None:
            hidden |= key_position <= position - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., :seq_len]
        output[first:last] = (weights @ values).transpose(0, 1).to(query.dtype)
    return output


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write keys and values token by token; see ``ops.write_kv``."""
    block_size = kv_layer.shape[3]
    rows = torch.stack([key, value], dim=1)
    for slot, row in zip(slot_mapping.tolist(), rows, strict=True):
        if slot < 0:
            continue
        block_id, offset = divmod(slot, block_size)
        if kv_scales is not None:
            row = _quantize(row.float(), kv_scales[block_id], kv_layer.dtype, sets_scale=offset == 0)
        kv_layer[block_id, :, :, offset] = row


def _quantize(
    row: torch.Tensor, scales: torch.Tensor, stored: torch.dtype, *, sets_scale: bool
) -> torch.Tensor:
    kv_format = KV_FORMATS[stored]
    if sets_scale:
        scales[:] = row.abs().amax(dim=-1).clamp(min=LOWEST_MAGNITUDE) * kv_format.scale_per_magnitude
    scaled = (row / scales[..., None]).clamp(-kv_format.largest, kv_format.largest)
    return (scaled.round() if stored == torch.int8 else scaled).to(stored)
