"""Writes the table of kernel configurations for the GPU of this machine.

    python -m quire.benchmarks.tune_kernels --head-dim 64,128 --block-size 16 --dry-run

Each candidate that the GPU has enough shared memory for is timed on a few steps; the one with the lowest
geometric mean of times replaces the row of this GPU's architecture. Rows of other architectures do not
change. tests/kernels/test_triton_compiled.py then checks that the rows suit the smaller GPUs of the
architecture too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import triton

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.benchmarks.kernels_gpu import Model, Step, gpu_name, make_step, seconds
from quire.engine.model.decode_graphs import CudaCapture
from quire.kernels.triton import configs
from quire.kernels.triton.attention import paged_attention
from quire.kernels.triton.configs import AttentionConfig, Kernel

TABLE = Path(configs.__file__).with_name("configs.json")
STEPS: dict[Kernel, tuple[tuple[int, int, int], ...]] = {
    "decode": ((1, 1, 4096), (16, 1, 2048), (128, 1, 1024), (8, 1, 32768)),
    "prefill": ((4, 2048, 2048), (8, 512, 4096), (1, 8192, 8192)),
}
"""(sequences, new tokens, length)."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    head_dim: tuple[int, ...] = (32, 64, 128, 256)
    kv_bits: tuple[int, ...] = (8, 16)
    block_size: int = 16
    dry_run: Annotated[bool, "print the table's new rows, and write nothing"] = False


def candidates(row: AttentionConfig) -> Iterator[AttentionConfig]:
    """Yield the row with each combination of tile sizes."""
    if row.kernel == "decode":
        choices = product([16], [16, 32, 64, 128], [2, 4, 8], [2, 3, 5, 7], [256, 512, 1024])
    else:
        choices = product([16, 32, 64, 128], [16, 32, 64, 128], [4, 8], [2, 3, 5], [0])
    for block_m, block_n, num_warps, num_stages, split_tokens in choices:
        yield replace(
            row,
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            split_tokens=split_tokens,
        )


def make_steps(row: AttentionConfig) -> Iterator[tuple[Model, Step, torch.Tensor | None]]:
    """Yield steps with blocks that match the row, and their scales."""
    dtype = torch.float32 if row.kv_bits == 32 else torch.bfloat16
    model = Model(32, 8, row.head_dim, row.block_size, dtype)
    for num_seqs, new_tokens, seq_len in STEPS[row.kernel]:
        step = make_step(model, num_seqs, new_tokens, seq_len)
        if row.kv_bits == 8:
            narrow, scales = step.narrow_blocks(torch.float8_e4m3fn)
            yield model, step._replace(kv_layer=narrow), scales
        else:
            yield model, step, None


def mean_seconds(config: AttentionConfig, steps: list[tuple[Model, Step, torch.Tensor | None]]) -> float:
    """Return the geometric mean of all steps' times; infinity if the GPU has too little shared memory."""

    def find_config(*_: Any) -> AttentionConfig:
        return config

    logs = []
    for model, step, scales in steps:
        run = partial(
            paged_attention,
            step.query,
            step.kv_layer,
            *step.metadata[:3],
            scale=model.scale,
            kv_scales=scales,
            max_new_tokens=step.new_tokens,
            find_config=find_config,
        )
        try:
            logs.append(math.log(seconds(CudaCapture()(run))))
        except triton.OutOfResources:
            return math.inf
    return math.exp(sum(logs) / len(logs))


def tune(row: AttentionConfig) -> tuple[AttentionConfig, float]:
    """Return the fastest candidate for a row, and its microseconds."""
    steps = list(make_steps(row))
    best, best_time = row, mean_seconds(row, steps)
    show_progress(f"{row}: {best_time * 1e6:.1f} us")
    for candidate in candidates(row):
        time = mean_seconds(candidate, steps)
        if time < best_time:
            best, best_time = candidate, time
            show_progress(f"{best}: {best_time * 1e6:.1f} us")
    return best, best_time * 1e6


def write_table(rows: list[AttentionConfig]) -> None:
    """Write the rows in order, one per line."""
    rows = sorted(rows, key=lambda row: (row.arch, row.kernel, row.kv_bits, row.head_dim, row.block_size))
    lines = ",\n".join(f"  {json.dumps(asdict(row))}" for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


@program
def main(options: Options) -> Report:
    """Tune all rows of this GPU."""
    device = gpu_name()
    arch = configs.arch_of(torch.device("cuda", torch.cuda.current_device()))
    known = {
        (row.arch, row.kernel, row.kv_bits, row.head_dim, row.block_size): row for row in configs.table()
    }
    kernels: tuple[Kernel, ...] = ("decode", "prefill")
    rows = []
    for kernel, kv_bits, head_dim in product(kernels, options.kv_bits, options.head_dim):
        row = configs.find_config(kernel, arch, kv_bits, head_dim, options.block_size)
        best, microseconds = tune(replace(row, block_size=options.block_size))
        known[arch, kernel, kv_bits, head_dim, options.block_size] = best
        rows.append({**asdict(best), "microseconds": microseconds})
        if not options.dry_run:
            write_table([*known.values()])
    columns = {each.name: f"{{{each.name}}}" for each in fields(AttentionConfig)}
    printed = table(device, rows, {**columns, "µs": "{microseconds:.1f}"})
    return Report([printed], {"device": device, "rows": rows})


if __name__ == "__main__":
    main()
