"""Checks of the kernels' arguments, made before the kernels are launched."""

from __future__ import annotations

import torch

from quire.kernels.quantization import KV_FORMATS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
MAX_ROW_DIM = 1024
"""Most elements of a latent and a rotated key together."""
WORD_BYTES = 16
"""Number of bytes that are copied or loaded at a time."""

Shape = tuple[int | str, ...]


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Shape,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Raise ValueError unless shape, dtype and device match; a string in the shape matches any size."""
    got = tuple(tensor.shape)
    fits = len(got) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(got, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name}: expected the shape [{expected}], got {list(got)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, where the blocks are, got {tensor.device}")


def check_kv_layer(kv_layer: torch.Tensor, kv_scales: torch.Tensor | None, latent_dim: int | None) -> None:
    """Raise ValueError unless these are blocks of one layer, with scales if and only if they have 8 bits."""
    device, most = kv_layer.device, MAX_HEAD_DIM if latent_dim is None else MAX_ROW_DIM
    check_tensor(
        "kv_layer",
        kv_layer,
        ("num_blocks", 2, "num_kv_heads", "block_size", "head_dim")
        if latent_dim is None
        else ("num_blocks", 1, 1, "block_size", "head_dim"),
        (*FLOATS, *KV_FORMATS),
        device,
    )
    if not (latent_dim or 0) < kv_layer.shape[4] <= most:
        raise ValueError(
            f"kv_layer: expected a head_dim of {(latent_dim or 0) + 1} to {most}, got {kv_layer.shape[4]}"
        )
    check_vectors("kv_layer", kv_layer)
    if (kv_layer.dtype in KV_FORMATS) != (kv_scales is not None):
        expected = "float32 scales" if kv_layer.dtype in KV_FORMATS else "None"
        raise ValueError(f"kv_scales: expected {expected} for blocks of {kv_layer.dtype}, got {kv_scales}")
    if kv_scales is not None:
        shape = kv_layer.shape[0], 2, kv_layer.shape[2]
        check_tensor("kv_scales", kv_scales, shape, (torch.float32,), device)


def check_vectors(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension has stride 1 or at most one element."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected a last dimension of stride 1, got the strides {tensor.stride()}")


def check_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_scales: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    latent_dim: int | None = None,
) -> None:
    """Raise ValueError unless the arguments of ``paged_attention`` fit together."""
    check_kv_layer(kv_layer, kv_scales, latent_dim)
    device = kv_layer.device
    num_kv_heads, head_dim = kv_layer.shape[2], kv_layer.shape[4]
    dtypes = FLOATS if kv_layer.dtype in KV_FORMATS else (kv_layer.dtype,)
    check_tensor("query", query, ("num_tokens", "num_heads", head_dim), dtypes, device)
    check_vectors("query", query)
    if query.shape[1] % num_kv_heads:
        raise ValueError(
            f"query: expected heads in groups of {num_kv_heads} KV heads, got {query.shape[1]} heads"
        )
    integers = (torch.int32,)
    check_tensor("seq_lens", seq_lens, ("num_seqs",), integers, device)
    num_seqs = seq_lens.shape[0]
    check_tensor("query_starts", query_starts, (num_seqs + 1,), integers, device)
    check_tensor("block_tables", block_tables, (num_seqs, "max_blocks_per_seq"), integers, device)
    check_vectors("block_tables", block_tables)
    for name, tensor in (("seq_lens", seq_lens), ("query_starts", query_starts)):
        check_vectors(name, tensor)
    for name, per_head in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if per_head is not None:
            check_tensor(name, per_head, (query.shape[1],), FLOATS, device)
            check_vectors(name, per_head)


def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of ``write_kv`` fit together."""
    latent_dim = value.shape[-1] if kv_layer.dim() == 5 and kv_layer.shape[1] == 1 else None
    check_kv_layer(kv_layer, kv_scales, latent_dim)
    device = kv_layer.device
    check_tensor("slot_mapping", slot_mapping, ("num_tokens",), (torch.int64,), device)
    check_vectors("slot_mapping", slot_mapping)
    shape = (slot_mapping.shape[0], kv_layer.shape[2], kv_layer.shape[4])
    dtypes = FLOATS if kv_layer.dtype in KV_FORMATS else (kv_layer.dtype,)
    for name, tensor, dim in (("key", key, shape[2]), ("value", value, latent_dim or shape[2])):
        check_tensor(name, tensor, (*shape[:2], dim), dtypes, device)
        check_vectors(name, tensor)


def check_blocks_are_runs(name: str, blocks: torch.Tensor) -> None:
    """Raise ValueError unless each block is contiguous and consists of whole, aligned 16-byte words."""
    if blocks.dim() < 2 or not blocks[:1].is_contiguous():
        raise ValueError(
            f"{name}: expected [num_blocks, ...] with contiguous blocks, got {list(blocks.shape)} with the "
            f"strides {blocks.stride()}"
        )
    size = blocks.element_size()
    block_bytes, stride_bytes = blocks[:1].numel() * size, blocks.stride(0) * size
    if block_bytes % WORD_BYTES or stride_bytes % WORD_BYTES or blocks.data_ptr() % WORD_BYTES:
        raise ValueError(
            f"{name}: expected blocks of a multiple of {WORD_BYTES} bytes, aligned to it, got {block_bytes} "
            f"bytes every {stride_bytes}, from the address {blocks.data_ptr():#x}"
        )


def check_ids(name: str, ids: torch.Tensor, shape: Shape, device: torch.device) -> None:
    """Raise ValueError unless ``ids`` are int32 or int64 block ids of the given shape and device."""
    check_tensor(name, ids, shape, (torch.int32, torch.int64), device)


def check_staging(blocks: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor) -> None:
    """Raise ValueError unless ``staging[i]`` can hold ``blocks[ids[i]]``."""
    check_blocks_are_runs("blocks", blocks)
    check_ids("ids", ids, ("num_ids",), blocks.device)
    check_tensor("staging", staging, (ids.shape[0], *blocks.shape[1:]), (blocks.dtype,), blocks.device)
    check_blocks_are_runs("staging", staging)


def as_storable(kv_layer: torch.Tensor) -> torch.Tensor:
    """View e4m3 blocks as uint8 bits, since not every architecture has the type."""
    return kv_layer.view(torch.uint8) if kv_layer.dtype == torch.float8_e4m3fn else kv_layer
