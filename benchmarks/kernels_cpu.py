"""Compares paged attention on the CPU with torch's SDPA on contiguous tensors, in one run.

    python -m quire.benchmarks.kernels_cpu --threads 2

Both read the same keys and values; SDPA has them in one piece for each sequence, paged attention in shuffled
blocks of 16. The ceiling of decode is a memory copy and a sum; the ceiling of prefill is torch's matrix
product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import best_seconds
from quire.benchmarks.harness.tables import table
from quire.kernels import ops, reference
from quire.kernels.metadata import AttentionMetadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 4, 64, 16
MAX_CHECKED_TOKENS = 20_000


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    threads: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    seconds: Annotated[float, "length of each measurement"] = 0.5


class Shape(NamedTuple):
    """A batch of sequences with ``cached`` tokens and ``new`` tokens to compute, and the ratio to reach."""

    num_seqs: int
    cached: int
    new: int
    goal: float

    def __str__(self) -> str:
        kind = "decode" if self.new == 1 else f"prefill {self.new} on"
        tokens = self.cached + self.new if self.new == 1 else self.cached
        return f"{kind} {self.num_seqs} x {tokens}"


SHAPES = (
    Shape(64, 299, 1, 1.0),
    Shape(16, 1999, 1, 1.0),
    Shape(1, 3999, 1, 1.0),
    Shape(1, 32767, 1, 1.0),
    Shape(1, 0, 512, 0.8),
    Shape(1, 512, 512, 0.8),
    Shape(1, 4096, 512, 0.8),
)


class Result(NamedTuple):
    """The times of both, and the bytes and operations of paged attention per second."""

    shape: str
    paged_ms: float
    sdpa_ms: float
    ratio: float
    goal: float
    gigabytes: float
    gigaflops: float
    max_error: float | None


def measure(shape: Shape, dtype: torch.dtype, seconds: float) -> Result:
    """Time both implementations for one shape, with the same keys and values."""
    length = shape.cached + shape.new
    num_blocks = -(-length // BLOCK_SIZE)
    tables = torch.randperm(shape.num_seqs * num_blocks).view(shape.num_seqs, num_blocks)
    blocks = torch.randn(shape.num_seqs * num_blocks, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
    query = torch.randn(shape.num_seqs * shape.new, NUM_HEADS, HEAD_DIM).to(dtype)
    metadata = AttentionMetadata(
        block_tables=tables.int(),
        query_starts=torch.arange(0, shape.num_seqs * shape.new + 1, shape.new, dtype=torch.int32),
        seq_lens=torch.full((shape.num_seqs,), length, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
    )
    # [seqs, blocks, 2, heads, slots, dim] -> [2, seqs, heads, tokens, dim]
    contiguous = blocks[tables].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length].contiguous()
    rows = query.view(shape.num_seqs, shape.new, NUM_HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    if shape.new == 1:
        # SDPA is faster with the query heads of one KV head as the rows of one head.
        rows = rows.view(shape.num_seqs, NUM_KV_HEADS, -1, HEAD_DIM)
    has_mask = shape.new > 1 and shape.cached > 0
    mask = torch.ones(shape.new, length, dtype=torch.bool).tril(shape.cached) if has_mask else None
    is_causal = shape.new > 1 and shape.cached == 0
    scale = HEAD_DIM**-0.5

    def paged() -> torch.Tensor:
        return ops.paged_attention(query, blocks, metadata, scale=scale)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            rows, contiguous[0], contiguous[1], attn_mask=mask, is_causal=is_causal, enable_gqa=True
        )

    error = None
    if shape.num_seqs * length <= MAX_CHECKED_TOKENS:
        expected = reference.paged_attention(query, blocks, metadata, scale=scale)
        error = (paged() - expected).abs().max().item()
        by_head = sdpa().view(shape.num_seqs, NUM_HEADS, shape.new, HEAD_DIM)
        same = by_head.transpose(1, 2).reshape(expected.shape)
        torch.testing.assert_close(same, expected, atol=1e-2, rtol=1e-2)
    paged()
    sdpa()
    paged_seconds, sdpa_seconds = (best_seconds(each, seconds=seconds) for each in (paged, sdpa))
    num_bytes = shape.num_seqs * length * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    pairs = shape.num_seqs * shape.new * (length - (shape.new - 1) / 2)
    return Result(
        str(shape),
        paged_seconds * 1e3,
        sdpa_seconds * 1e3,
        sdpa_seconds / paged_seconds,
        shape.goal,
        num_bytes / paged_seconds / 1e9,
        4 * NUM_HEADS * HEAD_DIM * pairs / paged_seconds / 1e9,
        error,
    )


def ceilings(seconds: float) -> dict[str, float]:
    """Measure the ceilings: bytes per second, and floating-point operations per second."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    copy, read, product = (
        best_seconds(each, seconds=seconds)
        for each in (lambda: target.copy_(source), source.sum, lambda: left @ right)
    )
    return {
        "copy_bytes_per_second": 2 * source.nbytes / copy,
        "read_bytes_per_second": source.nbytes / read,
        "matmul_flops": 2 * 1024**3 / product,
    }


@program
def main(options: Options) -> Report:
    """Measure all shapes and the ceilings."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    limits = ceilings(options.seconds)
    rows = [measure(shape, getattr(torch, options.dtype), options.seconds) for shape in SHAPES]
    columns = {
        "": "{shape}",
        "paged ms": "{paged_ms:.3f}",
        "SDPA ms": "{sdpa_ms:.3f}",
        "ratio": "{ratio:.2f}",
        "goal": "{goal:.1f}",
        "GB/s": "{gigabytes:.1f}",
        "GFLOP/s": "{gigaflops:.0f}",
        "error": "{max_error:.0e}",
    }
    title = f"{options.dtype}, {options.threads} threads, {NUM_HEADS} heads over {NUM_KV_HEADS} of {HEAD_DIM}"
    ceiling = (
        f"ceilings: copy {limits['copy_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"read {limits['read_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"matrix product {limits['matmul_flops'] / 1e9:.0f} GFLOP/s (torch)"
    )
    return Report([table(title, rows, columns), ceiling], {"ceilings": limits, "rows": rows})


if __name__ == "__main__":
    main()
