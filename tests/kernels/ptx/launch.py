"""Executes the PTX that Triton emits for sm_80 on a CPU: tests run the compiled kernels without a GPU.

::

    launch        takes the place of Triton's launch: compiles, then runs all CTAs
    program       parses PTX into basic blocks
    machine       executes a CTA: registers, warps, branches, barriers, asynchronous copies
    arithmetic    instructions on each thread's own registers
    fragments     matrix instructions of a warp
    memory        global and shared memory with their checks, and the race detector

What it does not show: faults of ``ptxas``, the rounding of tensor cores, speed, and memory ordering finer
than barriers. Code for sm_90 is another program.

``Emulator.run`` takes the place of ``triton.JITFunction.run``. So Triton itself chooses which arguments are
constants and which are multiples of 16, from the arguments of each launch.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.ptx.machine import Cta
from tests.kernels.ptx.memory import GlobalMemory, SharedMemory
from tests.kernels.ptx.program import Program, parse

TARGET = GPUTarget("cuda", 80, 32)
_compile = JITFunction.run
_parse = cache(parse)


class _Driver:
    """Stands in for the driver of a GPU; it has no device to launch on."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


@dataclass(frozen=True)
class Launch:
    """What one launch executed.

    Attributes:
        instructions: those of warps by opcode.
    """

    kernel: str
    types: dict[str, str]
    instructions: Counter[str]


@dataclass
class Emulator:
    """Executes launches.

    Attributes:
        order: draws the order of CTAs and warps. Without it, CTAs run in order and the warps of one together.
        mutate: returns the PTX to execute in place of the compiler's.
        launches: what has been executed.
    """

    order: np.random.Generator | None = None
    mutate: Callable[[str], str] = str
    launches: list[Launch] = field(default_factory=list)

    def run(self, kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        """Compile a kernel for the arguments and execute it.

        Raises:
            Fault: see the modules of this package.
        """
        compiled = _compile(kernel, *args, grid=grid, warmup=True, **options)
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
        types = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
        program = _parse(self.mutate(compiled.asm["ptx"]))
        bits = [_bits(arguments[name], kind) for name, kind in types.items()]
        # Two pointers to Triton's own scratch memory follow; no kernel uses it.
        parameters = dict(zip(program.parameters, [*bits, 0, 0], strict=True))
        memory = GlobalMemory(each for each in arguments.values() if isinstance(each, torch.Tensor))
        x, y, z = (*grid, 1, 1)[:3]
        shape = (x, y, z)
        visits: Counter[int] = Counter()
        for position in self._positions(shape):
            shared = SharedMemory(compiled.metadata.shared, program.num_threads // 32)
            cta = Cta(program, parameters, memory, shared, position, shape, self.order)
            with np.errstate(all="ignore"):
                cta.run()
            visits += cta.visits
        self.launches.append(Launch(program.name, types, _count(program, visits)))

    def _positions(self, grid: tuple[int, ...]) -> list[tuple[int, int, int]]:
        positions = [(x, y, z) for z, y, x in product(*(range(size) for size in reversed(grid)))]
        if self.order is not None:
            self.order.shuffle(positions)
        return [(int(x), int(y), int(z)) for x, y, z in positions]


@contextmanager
def installed(emulator: Emulator) -> Iterator[None]:
    """Execute all launches inside the context with the emulator."""

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        emulator.run(kernel, *args, **options)

    with patch.object(driver, "_active", _Driver()), patch.object(JITFunction, "run", run):
        yield


def _bits(value: Any, kind: str) -> int:
    """Return the bits of an argument of a type such as ``*bf16``, ``i32`` or ``fp32``."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)


def _count(program: Program, visits: Counter[int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number, warps in visits.items():
        for instruction in program.blocks[number]:
            counts[instruction.opcode] += warps
    return counts
