"""Paged attention on the CPU beside torch's SDPA on contiguous tensors, in one run.

    python -m quire.benchmarks.kernels_cpu --threads 2

Both read the same keys and values; SDPA has them in one piece for each sequence, paged attention in shuffled
blocks of 16. The ceilings: for decode a memory copy and a sum, for prefill a matrix product of torch. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from quire.kernels import ops, reference
from quire.kernels.metadata import AttentionMetadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 12, 4, 64, 16
SECONDS = 0.5
MAX_CHECKED_TOKENS = 20_000


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
    """Milliseconds of both, and what paged attention moved and computed."""

    paged_ms: float
    sdpa_ms: float
    bytes_per_second: float
    flops: float
    max_error: float | None


def best_seconds(run: Callable[[], Any]) -> float:
    """Return the shortest of many runs; the machine may be busy with others."""
    run()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def measure(shape: Shape, dtype: torch.dtype) -> Result:
    """Time one shape both ways on the same keys and values."""
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
    mask = None if shape.new == 1 else torch.ones(shape.new, length, dtype=torch.bool).tril(shape.cached)
    scale = HEAD_DIM**-0.5

    def paged() -> torch.Tensor:
        return ops.paged_attention(query, blocks, metadata, scale=scale)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            rows, contiguous[0], contiguous[1], attn_mask=mask, enable_gqa=True
        )

    error = None
    if shape.num_seqs * length <= MAX_CHECKED_TOKENS:
        expected = reference.paged_attention(query, blocks, metadata, scale=scale)
        error = (paged() - expected).abs().max().item()
    paged_seconds, sdpa_seconds = best_seconds(paged), best_seconds(sdpa)
    num_bytes = shape.num_seqs * length * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize
    pairs = shape.num_seqs * shape.new * (length - (shape.new - 1) / 2)
    return Result(
        paged_seconds * 1e3,
        sdpa_seconds * 1e3,
        num_bytes / paged_seconds,
        4 * NUM_HEADS * HEAD_DIM * pairs / paged_seconds,
        error,
    )


def read_bytes_per_second() -> float:
    """Measure how fast torch's threads read memory."""
    source = torch.randn(64 << 20)
    return source.nbytes / best_seconds(source.sum)


def ceilings() -> dict[str, float]:
    """Measure what memory and arithmetic allow: bytes per second and floating-point operations per second."""
    source = torch.randn(64 << 20)
    target = torch.empty_like(source)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / best_seconds(lambda: target.copy_(source)),
        "read_bytes_per_second": read_bytes_per_second(),
        "matmul_flops": 2 * 1024**3 / best_seconds(lambda: left @ right),
    }


def main() -> None:
    """Print the table and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    limits = ceilings()
    title = (
        f"{arguments.dtype}, {arguments.threads} threads, {NUM_HEADS} heads over {NUM_KV_HEADS} of {HEAD_DIM}"
    )
    table = Table("", "paged ms", "SDPA ms", "ratio", "goal", "GB/s", "GFLOP/s", "error", title=title)
    results = {}
    for shape in SHAPES:
        result = measure(shape, getattr(torch, arguments.dtype))
        results[str(shape)] = result._asdict()
        table.add_row(
            str(shape),
            f"{result.paged_ms:.3f}",
            f"{result.sdpa_ms:.3f}",
            f"{result.sdpa_ms / result.paged_ms:.2f}",
            f"{shape.goal:.1f}",
            f"{result.bytes_per_second / 1e9:.1f}",
            f"{result.flops / 1e9:.0f}",
            "" if result.max_error is None else f"{result.max_error:.0e}",
        )
    Console().print(table)
    print(
        f"ceilings: copy {limits['copy_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"read {limits['read_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"matrix product {limits['matmul_flops'] / 1e9:.0f} GFLOP/s (torch)"
    )
    print(json.dumps({"bench": "kernels_cpu", **vars(arguments), "ceilings": limits, "results": results}))


if __name__ == "__main__":
    main()
