"""What the compiled attention kernels do beyond the least possible, counted without a GPU.

    python -m tests.kernels.ptx.economy [--case "decode bfloat16 128"]

The interpreter of PTX executes the shipped kernels for sm_80 over shuffled blocks. It counts

    bytes      sectors of 32 bytes that the warps' accesses touch, as if no cache held them, over the bytes of
               queries, keys, values, scales, block table and output that the result needs, each once
    sectors    sectors over those that the distinct bytes of each access would fill
    banks      wavefronts of shared memory over those without bank conflicts
    PTX        instructions of a warp per token, KV head and key; moves between registers are left out,
               since the assembler removes most of them
    loop       instructions of machine code for each byte of keys and values that the loop over them consumes

and in bfloat16, how much more of each the paged kernel takes than the same kernel without a block table, over
a contiguous cache. There are several ways to write that one, and the least of each number counts. The results
must be the same bits. These are counts, not times: latency, caches and occupancy are not in them.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table

from quire.kernels.triton import configs
from quire.kernels.triton.attention import paged_attention
from tests.kernels.ptx.contiguous import CONTIGUOUS, contiguous_kernels, lay_out_contiguously
from tests.kernels.ptx.launch import Emulator, Launch, installed
from tests.kernels.ptx.tally import SECTOR, by_class

GOAL_PAGING = 0.05
"""The most that paging may add; the kernel of the PagedAttention paper takes 20 to 26 % longer."""
ISSUED_PER_BYTE = 108 * 4 * 1.41e9 / 2.039e12
"""Instructions of warps that an A100 issues while its memory moves a byte.

Each of 108 multiprocessors issues 4 per clock. A decode kernel above this is slower than its memory.
"""
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
SEED = 0
DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}


class Case(NamedTuple):
    """One sequence with ``cached`` tokens and ``new`` ones, in bfloat16 over blocks of a format."""

    kv: str
    head_dim: int
    cached: int
    new: int
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 4

    @property
    def kernel(self) -> str:
        return "decode" if self.new == 1 else "prefill"

    @property
    def length(self) -> int:
        return self.cached + self.new

    def __str__(self) -> str:
        return f"{self.kernel} {self.kv} {self.head_dim}"


CASES = (
    *(Case(kv, head_dim, 499, 1) for kv in ("bfloat16", "int8", "e4m3") for head_dim in (64, 128)),
    *(Case(kv, head_dim, 448, 64) for kv in ("bfloat16", "int8", "e4m3") for head_dim in (64, 128)),
)


class Inputs(NamedTuple):
    """Tensors of a case; ``blocks`` are in the order of the sequence."""

    query: torch.Tensor
    blocks: torch.Tensor
    scales: torch.Tensor | None
    order: torch.Tensor


class Counts(NamedTuple):
    """What the attention kernel of a launch did; ``instructions`` of warps by class."""

    sector_bytes: int
    sectors: int
    least_sectors: int
    footprint_bytes: int
    wavefronts: int
    least_wavefronts: int
    instructions: dict[str, int]
    loop_instructions: int
    loop_instructions_per_byte: float
    bytes_by_tensor: dict[str, int]

    @property
    def num_instructions(self) -> int:
        """All instructions of warps without moves between registers."""
        return sum(self.instructions.values()) - self.instructions.get("move", 0)


class Result(NamedTuple):
    """Counts of the paged kernel, and of each way to write the contiguous one."""

    case: Case
    paged: Counts
    contiguous: list[Counts]

    @property
    def paging(self) -> dict[str, float] | None:
        """What paging adds, as shares of the least that a contiguous kernel takes."""
        if not self.contiguous:
            return None

        def added(count: Callable[[Counts], int]) -> float:
            return count(self.paged) / min(map(count, self.contiguous)) - 1

        return {
            "bytes": added(lambda each: each.sector_bytes),
            "ptx": added(lambda each: each.num_instructions),
            "loop": added(lambda each: each.loop_instructions),
        }

    @property
    def shares(self) -> dict[str, float]:
        """The columns of the table but for paging."""
        keys = self.case.new * self.case.num_kv_heads * self.case.length
        return {
            "bytes": self.paged.sector_bytes / needed_bytes(self.case),
            "sectors": self.paged.sectors / self.paged.least_sectors,
            "banks": self.paged.wavefronts / self.paged.least_wavefronts,
            "ptx_per_key": self.paged.num_instructions / keys,
            "ptx_per_kiloflop": 1000 * self.paged.num_instructions / useful_flops(self.case),
            "loop_per_byte": self.paged.loop_instructions_per_byte,
        }


def useful_flops(case: Case) -> int:
    """Return the operations of both matrix products, over the keys that each new token sees."""
    seen = sum(case.cached + number + 1 for number in range(case.new))
    return 4 * case.head_dim * case.num_kv_heads * case.group * seen


def needed_bytes(case: Case) -> int:
    """Return the bytes of everything that the result depends on and of the result, each once."""
    keys_and_values = 2 * case.num_kv_heads * case.length * case.head_dim
    num_blocks = -(-case.length // case.block_size)
    if case.kv == "bfloat16":
        stored = 2 * keys_and_values
    else:
        stored = keys_and_values + 4 * 2 * case.num_kv_heads * num_blocks
    query_and_output = 2 * 2 * case.new * case.num_kv_heads * case.group * case.head_dim
    return stored + query_and_output + 4 * num_blocks


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(SEED)
    num_blocks = -(-case.length // case.block_size)
    shape = (num_blocks, 2, case.num_kv_heads, case.block_size, case.head_dim)
    values = torch.randn(shape, generator=generator)
    query = torch.randn((case.new, case.num_kv_heads * case.group, case.head_dim), generator=generator)
    scales = None
    if case.kv != "bfloat16":
        values = (32 * values).clamp(-100, 100)
        scales = torch.rand(shape[:3], generator=generator) / 32
    order = torch.randperm(num_blocks, generator=generator)
    return Inputs(query.bfloat16(), values.to(DTYPES[case.kv]), scales, order)


def attend(
    case: Case, query: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor | None, table: torch.Tensor
) -> torch.Tensor:
    return paged_attention(
        query,
        blocks,
        table[None].int(),
        torch.tensor([0, case.new], dtype=torch.int32),
        torch.tensor([case.length], dtype=torch.int32),
        scale=0.1,
        kv_scales=scales,
        max_new_tokens=case.new,
    )


def measure(case: Case) -> Result:
    """Execute the paged kernel and, in bfloat16, the contiguous ones: 8-bit scales belong to blocks.

    Raises:
        RuntimeError: the results are not the same bits.
    """
    query, blocks, scales, order = make_inputs(case)
    shuffled = torch.empty_like(blocks)
    shuffled[order] = blocks
    shuffled_scales = None if scales is None else torch.empty_like(scales).index_copy_(0, order, scales)
    paged = Emulator(is_counting=True)
    with installed(paged):
        output = attend(case, query, shuffled, shuffled_scales, order)
    contiguous = []
    for variant in CONTIGUOUS if scales is None else ():
        emulator = Emulator(is_counting=True)
        with contiguous_kernels(variant), installed(emulator):
            expected = attend(case, query, lay_out_contiguously(blocks), None, torch.zeros_like(order))
        if not torch.equal(output, expected):
            raise RuntimeError(f"{case}: the paged kernel and the contiguous one differ")
        contiguous.append(counts_of(case, emulator.launches))
    return Result(case, counts_of(case, paged.launches), contiguous)


def counts_of(case: Case, launches: Sequence[Launch]) -> Counts:
    """Return the counts of the case's kernel; the other one of a step returns at once."""
    (launch,) = (each for each in launches if each.kernel == f"{case.kernel}_kernel")
    assert launch.tally
    in_global, in_shared = launch.tally.in_global.values(), launch.tally.in_shared.values()
    bytes_by_tensor = {
        f"{name} {direction}": SECTOR * traffic.sectors
        for (name, direction), traffic in sorted(launch.tally.in_global.items())
    }
    bits = 16 if case.kv == "bfloat16" else 8
    config = configs.find_config(case.kernel, "sm_80", bits, case.head_dim, case.block_size)
    tile_bytes = 2 * config.block_n * case.head_dim * bits // 8
    loop = loop_instructions(launch.cubin)
    return Counts(
        sector_bytes=sum(bytes_by_tensor.values()),
        sectors=sum(each.sectors for each in in_global),
        least_sectors=sum(each.least_sectors for each in in_global),
        footprint_bytes=SECTOR * sum(len(each.footprint) for each in in_global),
        wavefronts=sum(each.wavefronts for each in in_shared),
        least_wavefronts=sum(each.least_wavefronts for each in in_shared),
        instructions=dict(sorted(by_class(launch.instructions).items())),
        loop_instructions=loop,
        loop_instructions_per_byte=loop * config.num_warps / tile_bytes,
        bytes_by_tensor=bytes_by_tensor,
    )


def loop_instructions(cubin: bytes) -> int:
    """Return the instructions of machine code in the first innermost loop that multiplies matrices.

    Raises:
        ValueError: there is none.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [BINARIES / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
    code = [(int(address, 16), line) for address, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    loops = []
    for address, line in code:
        branch = re.search(r"\bBRA (?:\S+ )?`?\(?0x([0-9a-f]+)", line)
        if branch and int(branch[1], 16) < address:
            body = [each for at, each in code if int(branch[1], 16) <= at <= address]
            if any("HMMA" in each for each in body):
                loops.append(len(body))
    if not loops:
        raise ValueError("the machine code has no loop that multiplies matrices")
    return loops[0]


def format_table(results: Sequence[Result]) -> Table:
    table = Table(title="counts over the least possible; per key, byte; added by paging (%)")
    names = ("bytes", "sectors", "banks", "PTX/key", "loop/byte", "paging: bytes", "PTX", "loop")
    for name in ("", *names):
        table.add_column(name, justify="right" if name else "left")
    for result in results:
        shares = result.shares
        cells = [f"{shares[name]:.3f}" for name in ("bytes", "sectors", "banks")]
        cells += [f"{shares['ptx_per_key']:.1f}", f"{shares['loop_per_byte']:.3f}"]
        added = result.paging
        cells += ["", "", ""] if added is None else [f"{100 * value:+.1f}" for value in added.values()]
        table.add_row(str(result.case), *cells)
    table.add_section()
    goal = f"{100 * GOAL_PAGING:.0f}"
    table.add_row("ceiling", "1", "1", "1", "", f"{ISSUED_PER_BYTE:.3f} decode", goal, goal, goal)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[str(case) for case in CASES], help="only this one")
    wanted = parser.parse_args().case
    # Triton parses sources, and a collection meanwhile can trip the parser of CPython 3.11.
    gc.disable()
    results = [measure(case) for case in CASES if wanted in (None, str(case))]
    Console(width=120).print(format_table(results))
    rows = [
        {
            "case": str(result.case),
            "shares": result.shares,
            "paging": result.paging,
            "paged": result.paged._asdict(),
            "contiguous": [each._asdict() for each in result.contiguous],
        }
        for result in results
    ]
    summary = {"benchmark": "kernel_economy", "triton": triton.__version__, "arch": "sm_80"}
    print(json.dumps(summary | {"issued_per_byte": ISSUED_PER_BYTE, "cases": rows}))


if __name__ == "__main__":
    main()
