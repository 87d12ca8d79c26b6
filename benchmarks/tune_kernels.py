"""Writes the table of kernel configurations for the GPU of this machine.

    python -m quire.benchmarks.tune_kernels --head-dim 64,128 --block-size 16 --dry-run

Each candidate that the GPU has enough shared memory for is timed on a few steps; the one with the lowest
geometric mean of times replaces the row of this GPU's architecture. Rows of other architectures do not
change. Compilation takes most of the time, so all processors compile first.
tests/kernels/test_triton_compiled.py then checks that the rows suit the smaller GPUs of the architecture too.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
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
from quire.kernels.triton.attention import FindConfig, paged_attention
from quire.kernels.triton.configs import AttentionConfig, Kernel

TABLE = Path(configs.__file__).with_name("configs.json")
STEPS: dict[Kernel, tuple[tuple[int, int, int], ...]] = {
    "decode": ((128, 1, 1024), (16, 1, 2048), (1, 1, 4096), (8, 1, 32768)),
    "prefill": ((4, 2048, 2048), (8, 512, 4096), (1, 8192, 8192)),
}
"""(sequences, new tokens, length)."""
SMALL_STEPS: dict[Kernel, tuple[int, int, int]] = {"decode": (2, 1, 4096), "prefill": (2, 128, 256)}
"""Steps that need the same code as those of STEPS, and little memory."""
GIVE_UP = 1.25
"""A candidate that takes so much longer than the best one in the first step is not timed in the others."""

Timed = tuple[Model, Step, torch.Tensor | None]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    head_dim: tuple[int, ...] = (32, 64, 128, 256)
    kv_bits: tuple[int, ...] = (8, 16)
    block_size: int = 16
    dry_run: Annotated[bool, "print the table's new rows, and write nothing"] = False


def candidates(row: AttentionConfig) -> Iterator[AttentionConfig]:
    """Yield the row, and then the row with each combination of tile sizes."""
    yield row
    if row.kernel == "decode":
        choices = product([16], [32, 64, 128], [1, 2, 4], [3, 5], [512, 1024])
    else:
        choices = product([64, 128], [32, 64, 128], [4, 8], [2, 3], [0])
    for block_m, block_n, num_warps, num_stages, split_tokens in choices:
        yield replace(
            row,
            block_m=block_m,
            block_n=block_n,
            num_warps=num_warps,
            num_stages=num_stages,
            split_tokens=split_tokens,
        )


def make_timed(row: AttentionConfig, num_seqs: int, new_tokens: int, seq_len: int) -> Timed:
    """Return a step with blocks that match the row, and their scales."""
    dtype = torch.float32 if row.kv_bits == 32 else torch.bfloat16
    model = Model(32, 8, row.head_dim, row.block_size, dtype)
    step = make_step(model, num_seqs, new_tokens, seq_len)
    if row.kv_bits != 8:
        return model, step, None
    narrow, scales = step.narrow_blocks(torch.float8_e4m3fn)
    return model, step._replace(kv_layer=narrow), scales


def only(config: AttentionConfig) -> FindConfig:
    """Return a function that finds a configuration for its kernel, and the table's for the other one."""

    def find_config(kernel: Kernel, *case: Any) -> AttentionConfig:
        return config if kernel == config.kernel else configs.find_config(kernel, *case)

    return find_config


def launch(config: AttentionConfig, timed: Timed) -> Callable[[], torch.Tensor]:
    """Return a function that runs a step with a configuration."""
    model, step, scales = timed
    return partial(
        paged_attention,
        step.query,
        step.kv_layer,
        *step.metadata[:3],
        scale=model.scale,
        kv_scales=scales,
        max_new_tokens=step.new_tokens,
        find_config=only(config),
    )


def compile_in_turn(configs_of_one: list[AttentionConfig]) -> None:
    """Compile candidates into Triton's cache on disk, by running each once."""
    for config in configs_of_one:
        with suppress(triton.OutOfResources):
            launch(config, make_timed(config, *SMALL_STEPS[config.kernel]))()


def compile_all(rows: list[AttentionConfig]) -> None:
    """Compile the candidates of all rows, with one process per processor."""
    everything = [candidate for row in rows for candidate in candidates(row)]
    count = min(len(os.sched_getaffinity(0)), len(everything))
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        for done, _ in enumerate(pool.map(compile_in_turn, (everything[i::count] for i in range(count))), 1):
            show_progress(f"compiled by {done} of {count} processes")


def tune(row: AttentionConfig) -> tuple[AttentionConfig, float]:
    """Return the fastest candidate for a row, and the geometric mean of its microseconds."""
    steps = [make_timed(row, *sizes) for sizes in STEPS[row.kernel]]
    best, best_times = row, [math.inf] * len(steps)
    for candidate in candidates(row):
        times: list[float] = []
        with suppress(triton.OutOfResources):
            for timed in steps:
                times.append(seconds(CudaCapture()(launch(candidate, timed)), milliseconds=20))
                if times[0] > GIVE_UP * best_times[0]:
                    break
        if len(times) == len(steps) and math.prod(times) < math.prod(best_times):
            best, best_times = candidate, times
            mean = math.prod(times) ** (1 / len(times)) * 1e6
            show_progress(f"{best}: {mean:.1f} us")
    return best, math.prod(best_times) ** (1 / len(steps)) * 1e6


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
    present = [
        replace(
            configs.find_config(kernel, arch, kv_bits, head_dim, options.block_size),
            block_size=options.block_size,
        )
        for kernel, kv_bits, head_dim in product(kernels, options.kv_bits, options.head_dim)
    ]
    compile_all(present)
    rows = []
    for row in present:
        best, microseconds = tune(row)
        known[arch, row.kernel, row.kv_bits, row.head_dim, options.block_size] = best
        rows.append({**asdict(best), "microseconds": microseconds})
        if not options.dry_run:
            write_table([*known.values()])
    columns = {each.name: f"{{{each.name}}}" for each in fields(AttentionConfig)}
    printed = table(device, rows, {**columns, "µs": "{microseconds:.1f}"})
    return Report([printed], {"device": device, "rows": rows})


if __name__ == "__main__":
    main()
