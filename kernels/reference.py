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
    is_chunked: bool = False,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    latent_dim: int | None = None,
) -> torch.Tensor:
    """Compute attention in float64; see ``ops.paged_attention``."""
    output = torch.empty_like(query[..., :latent_dim])
    block_size = kv_layer.shape[3]
    group = query.shape[1] // kv_layer.shape[2]
    starts = metadata.query_starts.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        block_ids = metadata.block_tables[row, : -(-seq_len // block_size)].long()
        # [num_blocks, parts, heads, block_size, head_dim] -> [parts, heads, tokens, head_dim]
        stored = kv_layer[block_ids].double()
        if kv_scales is not None:
            stored *= _factors(kv_scales[block_ids], kv_layer.shape[4], latent_dim)
        blocks = stored.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
        blocks = blocks.repeat_interleave(group, dim=1)
        keys, values = blocks[0], blocks[-1, ..., :latent_dim]
        scores = query[first:last].transpose(0, 1).double() @ keys.transpose(1, 2) * scale
        if logit_softcap is not None:
            scores = logit_softcap * torch.tanh(scores / logit_softcap)
        position = torch.arange(seq_len - (last - first), seq_len)[:, None]
        key_position = torch.arange(seq_len)[None, :]
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.double()[:, None, None] * (key_position - position)
        hidden = key_position > position
        if sliding_window is not None:
            lowest = position - (position % sliding_window if is_chunked else sliding_window - 1)
            hidden |= key_position < lowest
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
    block_size, head_dim = kv_layer.shape[3:]
    latent_dim = value.shape[-1] if kv_layer.shape[1] == 1 else None
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block_id, offset = divmod(slot, block_size)
        row = torch.stack([key[token], value[token]] if latent_dim is None else [key[token]])
        if kv_scales is not None:
            scales = kv_scales[block_id]
            if offset == 0:
                per_magnitude = KV_FORMATS[kv_layer.dtype].scale_per_magnitude
                scales[:] = _magnitudes(row.float(), latent_dim).clamp(min=LOWEST_MAGNITUDE) * per_magnitude
            row = _quantize(row.float() / _factors(scales, head_dim, latent_dim)[..., 0, :], kv_layer.dtype)
        kv_layer[block_id, :, :, offset] = row


def _factors(scales: torch.Tensor, head_dim: int, latent_dim: int | None) -> torch.Tensor:
    """Return scales ``[..., 2, heads]`` as factors of ``[..., parts, heads, block_size, head_dim]``."""
    if latent_dim is None:
        return scales[..., None, None]
    sizes = torch.tensor([latent_dim, head_dim - latent_dim])
    return scales[..., 0].repeat_interleave(sizes, dim=-1)[..., None, None, None, :]


def _magnitudes(row: torch.Tensor, latent_dim: int | None) -> torch.Tensor:
    """Return the largest magnitudes ``[2, heads]`` of a token's ``[parts, heads, head_dim]``."""
    if latent_dim is None:
        return row.abs().amax(dim=-1)
    return torch.stack([each.abs().amax(dim=-1) for each in (row[0, :, :latent_dim], row[0, :, latent_dim:])])


def _quantize(scaled: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    largest = KV_FORMATS[stored].largest
    scaled = scaled.clamp(-largest, largest)
    return (scaled.round() if stored == torch.int8 else scaled).to(stored)
