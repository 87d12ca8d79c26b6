"""Executes a parsed kernel, one CTA at a time. A register is an array over the CTA's threads.

Warps have a program counter each, which moves from basic block to basic block. Warps at the same block
execute it together. Instructions that only some threads execute keep the other threads' registers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx import fragments
from tests.kernels.ptx.arithmetic import TYPES, Dtype, find_operation
from tests.kernels.ptx.fragments import WARP
from tests.kernels.ptx.memory import POISON, GlobalMemory, SharedMemory
from tests.kernels.ptx.program import (
    Address,
    Fault,
    Immediate,
    Instruction,
    Operand,
    Program,
    Register,
    Special,
)

Array = NDArray[Any]
Mask = Array | None
"""Which threads execute an instruction, bool ``[threads]``; None means all."""
Step = Callable[["Cta", Mask], None]
MAX_BLOCKS = 5_000
"""Basic blocks that a CTA may execute, so that a kernel with a fault ends."""


@dataclass
class Copy:
    """An asynchronous copy that its threads have not waited for; arrays are ``[threads]``."""

    threads: Array
    targets: Array
    sources: Array
    source_sizes: Array
    size: int
    group: Array
    """The group of each thread that the copy belongs to, counted from 0."""

    def part(self, chosen: Array) -> Copy:
        return Copy(
            self.threads[chosen],
            self.targets[chosen],
            self.sources[chosen],
            self.source_sizes[chosen],
            self.size,
            self.group[chosen],
        )


@dataclass
class Cta:
    """The state of one CTA.

    Attributes:
        parameters: bits of each parameter.
        order: draws the warp that runs next. Without it, all warps at the first block of any run together.
        visits: number of warps that executed each basic block.
    """

    program: Program
    parameters: Mapping[str, int]
    memory: GlobalMemory
    shared: SharedMemory
    position: tuple[int, int, int]
    grid: tuple[int, int, int]
    order: np.random.Generator | None = None
    visits: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.num_threads = self.program.num_threads
        self.num_warps = self.num_threads // WARP
        self.thread_ids = np.arange(self.num_threads)
        self.warp_of = self.thread_ids // WARP
        self.specials = {"%tid.x": self.thread_ids, "global_smem": np.zeros(self.num_threads, np.int64)}
        for axis, position, size in zip("xyz", self.position, self.grid, strict=True):
            self.specials[f"%ctaid.{axis}"] = np.full(self.num_threads, position)
            self.specials[f"%nctaid.{axis}"] = np.full(self.num_threads, size)
        self.registers: dict[str, Array] = {}
        self.block_of = np.zeros(self.num_warps, int)
        self.is_running = np.ones(self.num_warps, bool)
        self.is_waiting = np.zeros(self.num_warps, bool)
        self.copies: list[Copy] = []
        self.num_groups = np.zeros(self.num_threads, int)

    def run(self) -> None:
        """Run all warps to the end.

        Raises:
            Fault: see the modules of this package.
        """
        for _ in range(MAX_BLOCKS):
            ready = self.is_running & ~self.is_waiting
            if ready.any():
                self._run_block(self._choose(ready))
            elif self.is_running.any():
                self._pass_barrier()
            else:
                break
        else:
            raise Fault(f"{self.program.name}: no end after {MAX_BLOCKS} basic blocks")
        if self.copies:
            raise Fault(f"{self.program.name}: asynchronous copies were not waited for")

    def _choose(self, ready: Array) -> Array:
        """Return which warps run next; all of them are at the same basic block."""
        if self.order is None:
            first: Array = ready & (self.block_of == self.block_of[ready].min())
            return first
        chosen = np.zeros(self.num_warps, bool)
        chosen[self.order.choice(np.flatnonzero(ready))] = True
        return chosen

    def _pass_barrier(self) -> None:
        if not self.is_waiting.all():
            raise Fault(f"{self.program.name}: some warps wait at a barrier, and others have returned")
        self.is_waiting[:] = False
        self.shared.pass_barrier()

    def _run_block(self, warps: Array) -> None:
        number = int(self.block_of[warps][0])
        self.visits[number] += int(warps.sum())
        self.block_of[warps] += 1
        lanes = None if warps.all() else warps.repeat(WARP)
        for instruction in self.program.blocks[number]:
            try:
                mask = self._guarded(instruction, lanes)
                if mask is None or mask.any():
                    if instruction.opcode in _CONTROL:
                        _CONTROL[instruction.opcode](self, instruction, self._whole_warps(mask))
                    else:
                        bind(instruction)(self, mask)
            except Fault as fault:
                raise Fault(f"{instruction}: {fault}") from None

    def _guarded(self, instruction: Instruction, lanes: Mask) -> Mask:
        if instruction.guard is None:
            return lanes
        mask = self.read(instruction.guard.register, np.bool_) ^ instruction.guard.is_negated
        if lanes is not None:
            mask = mask & lanes
        return None if mask.all() else mask

    def _whole_warps(self, mask: Mask) -> Array:
        """Return the warps of a mask; an instruction that concerns warps needs all of their threads."""
        if mask is None:
            return np.ones(self.num_warps, bool)
        by_warp = mask.reshape(-1, WARP)
        warps: Array = np.any(by_warp, axis=1)
        if (warps != by_warp.all(axis=1)).any():
            raise Fault("the threads of a warp disagree")
        return warps

    def _branch(self, instruction: Instruction, warps: Array) -> None:
        if instruction.target is None or instruction.target not in self.program.starts:
            raise Fault("a branch to an unknown label")
        self.block_of[warps] = self.program.starts[instruction.target]

    def _wait(self, instruction: Instruction, warps: Array) -> None:
        if instruction.operands != (Immediate(0),):
            raise Fault(f"unknown instruction: {instruction.text}")
        self.is_waiting |= warps

    def _return(self, _: Instruction, warps: Array) -> None:
        self.is_running &= ~warps

    def read(self, operand: Operand, kind: Dtype) -> Array:
        """Return an operand of each thread as a type; a narrower type takes the low bits."""
        match operand:
            case Register(name, bits):
                # Lanes that a guard leaves out may shuffle registers that were never written.
                stored = self.registers.get(name)
                if stored is None:
                    return _constant(-1, np.dtype(kind).str, self.num_threads)
                wanted = 8 * np.dtype(kind).itemsize
                return stored if bits == 1 else stored.astype(f"uint{wanted}", copy=False).view(kind)
            case Immediate(value):
                return _constant(value, np.dtype(kind).str, self.num_threads)
            case Special(name) if name in self.specials:
                return self.specials[name].astype(kind)
        raise Fault(f"not an operand of each thread: {operand}")

    def write(self, register: Operand, values: Array, mask: Mask) -> None:
        """Write a register in the threads of the mask; a wider register extends the values by their sign."""
        if not isinstance(register, Register):
            raise Fault(f"not a register: {register}")
        bits = register.bits
        if bits > 1 and values.itemsize * 8 != bits:
            values = values.astype(f"{'' if values.dtype.kind == 'i' else 'u'}int{bits}")
        stored = values if bits == 1 else values.view(f"uint{bits}")
        if mask is not None:
            before = self.registers.get(register.name, stored.dtype.type(1 if bits == 1 else 2**bits - 1))
            stored = np.where(mask, stored, before)
        self.registers[register.name] = stored

    def addresses(self, operand: Operand, mask: Mask) -> tuple[Array, Array]:
        """Return the threads of the mask, and the address that an operand gives each."""
        if not isinstance(operand, Address):
            raise Fault(f"not an address: {operand}")
        is_wide = isinstance(operand.base, Register) and operand.base.bits == 64
        base = self.read(operand.base, np.uint64 if is_wide else np.uint32).astype(np.int64) + operand.offset
        threads = self.thread_ids if mask is None else np.flatnonzero(mask)
        return threads, base.astype(np.uint64)[threads]

    def finish_copies(self, mask: Mask, num_open: int) -> None:
        """Write the copies of all groups but the newest ``num_open`` ones of each thread of the mask."""
        waits = np.ones(self.num_threads, bool) if mask is None else mask
        kept = []
        for copy in self.copies:
            is_done = waits[copy.threads] & (copy.group < self.num_groups[copy.threads] - num_open)
            if is_done.any():
                self._finish(copy.part(is_done))
            if not is_done.all():
                kept.append(copy.part(~is_done))
        self.copies = kept

    def _finish(self, copy: Copy) -> None:
        data = np.zeros((len(copy.threads), copy.size), np.uint8)
        is_read = copy.source_sizes > 0
        if (copy.source_sizes[is_read] != copy.size).any():
            raise Fault("unknown instruction: a copy of a part of its size")
        data[is_read] = self.memory.load(copy.sources[is_read], copy.size)
        self.shared.end_copy(copy.targets, data, self.warp_of[copy.threads])


_CONTROL: dict[str, Callable[[Cta, Instruction, Array], None]] = {
    "bra": Cta._branch,
    "bra.uni": Cta._branch,
    "bar.sync": Cta._wait,
    "ret": Cta._return,
}


@cache
def _constant(value: int, kind: str, num_threads: int) -> Array:
    if np.dtype(kind) == np.bool_:
        return np.full(num_threads, bool(value))
    bits = 8 * np.dtype(kind).itemsize
    return np.full(num_threads, value & (1 << bits) - 1, f"uint{bits}").view(kind)


@cache
def bind(instruction: Instruction) -> Step:
    """Return the function that executes an instruction.

    Raises:
        Fault: the instruction is unknown.
    """
    operands = instruction.operands
    match instruction.opcode.split("."):
        case ["ld", "param", kind]:
            return _load_parameter(operands, TYPES[kind])
        case ["ld" | "st" as name, "global" | "shared" as space, *vector, kind] if vector in (
            [],
            ["v2"],
            ["v4"],
        ):
            return (_load if name == "ld" else _store)(operands, space == "shared", TYPES[kind])
        case ["cp", "async", "ca" | "cg", "shared", "global"]:
            return _copy(operands)
        case ["cp", "async", "commit_group"]:
            return _commit
        case ["cp", "async", "wait_group"]:
            return _wait_for_copies(operands)
        case ["ldmatrix", "sync", "aligned", "m8n8", "x1" | "x2" | "x4" as count, *trans, "shared", "b16"]:
            return _load_matrices(operands, int(count[1]), trans == ["trans"])
        case ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16" | "f16" as kind, _, "f32"]:
            return _multiply(operands, kind)
        case ["shfl", "sync", "bfly" | "idx" as mode, "b32"]:
            return _shuffle(operands, mode)
        case ["mov", _] if any(isinstance(each, tuple) for each in operands):
            return _unpack(operands) if isinstance(operands[0], tuple) else _pack(operands)
    operation = find_operation(instruction.opcode)
    target, *inputs = operands

    def compute(cta: Cta, mask: Mask) -> None:
        values = [cta.read(each, kind) for each, kind in zip(inputs, operation.inputs, strict=True)]
        cta.write(target, operation.compute(*values), mask)

    return compute


def _elements(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _number(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise Fault(f"expected a constant, got {operand}")
    return operand.value


def _load_parameter(operands: tuple[Operand, ...], kind: Dtype) -> Step:
    target, source = operands
    if not isinstance(source, Address) or not isinstance(source.base, Special):
        raise Fault(f"not a parameter: {source}")
    name = source.base.name

    def execute(cta: Cta, mask: Mask) -> None:
        cta.write(target, _constant(cta.parameters[name], np.dtype(kind).str, cta.num_threads), mask)

    return execute


def _load(operands: tuple[Operand, ...], is_shared: bool, kind: Dtype) -> Step:
    targets, address = _elements(operands[0]), operands[1]
    size = np.dtype(kind).itemsize * len(targets)

    def execute(cta: Cta, mask: Mask) -> None:
        threads, addresses = cta.addresses(address, mask)
        if is_shared:
            data = cta.shared.load(addresses, size, cta.warp_of[threads])
        else:
            data = cta.memory.load(addresses, size)
        everywhere = np.full((cta.num_threads, size), POISON, np.uint8)
        everywhere[threads] = data
        for target, values in zip(targets, everywhere.view(kind).T, strict=True):
            cta.write(target, np.ascontiguousarray(values), mask)

    return execute


def _store(operands: tuple[Operand, ...], is_shared: bool, kind: Dtype) -> Step:
    address, sources = operands[0], _elements(operands[1])

    def execute(cta: Cta, mask: Mask) -> None:
        threads, addresses = cta.addresses(address, mask)
        values = np.stack([cta.read(each, kind)[threads] for each in sources], axis=1)
        data = values.view(np.uint8)
        if is_shared:
            cta.shared.store(addresses, data, cta.warp_of[threads])
        else:
            cta.memory.store(addresses, data)

    return execute


def _copy(operands: tuple[Operand, ...]) -> Step:
    target, source, size_operand, *rest = operands
    size = _number(size_operand)

    def execute(cta: Cta, mask: Mask) -> None:
        threads, targets = cta.addresses(target, mask)
        _, sources = cta.addresses(source, mask)
        source_sizes = cta.read(rest[0] if rest else size_operand, np.uint32)[threads]
        cta.shared.begin_copy(targets, size, cta.warp_of[threads])
        cta.copies.append(Copy(threads, targets, sources, source_sizes, size, cta.num_groups[threads]))

    return execute


def _commit(cta: Cta, mask: Mask) -> None:
    cta.num_groups = cta.num_groups + (1 if mask is None else mask)


def _wait_for_copies(operands: tuple[Operand, ...]) -> Step:
    num_open = _number(operands[0])
    return lambda cta, mask: cta.finish_copies(mask, num_open)


def _load_matrices(operands: tuple[Operand, ...], count: int, is_transposed: bool) -> Step:
    targets, address = _elements(operands[0]), operands[1]

    def execute(cta: Cta, mask: Mask) -> None:
        warps = np.flatnonzero(cta._whole_warps(mask))
        _, by_thread = cta.addresses(address, None)
        rows = by_thread.reshape(-1, WARP)[warps, : 8 * count].reshape(-1)
        data = cta.shared.load(rows, 16, warps.repeat(8 * count))
        matrices = data.view(np.uint16).reshape(len(warps), count, 8, 8)
        for target, values in zip(targets, fragments.distribute(matrices, is_transposed), strict=True):
            everywhere = np.zeros((cta.num_warps, WARP), np.uint32)
            everywhere[warps] = values
            cta.write(target, everywhere.reshape(-1), mask)

    return execute


def _multiply(operands: tuple[Operand, ...], kind: str) -> Step:
    targets, *inputs = (_elements(each) for each in operands)

    def execute(cta: Cta, mask: Mask) -> None:
        cta._whole_warps(mask)
        a, b, c = (
            np.stack([cta.read(each, np.uint32) for each in registers], axis=1).reshape(
                -1, WARP, len(registers)
            )
            for registers in inputs
        )
        result = fragments.multiply(a, b, c.view(np.float32), kind).reshape(cta.num_threads, 4)
        for target, values in zip(targets, result.T, strict=True):
            cta.write(target, np.ascontiguousarray(values), mask)

    return execute


def _shuffle(operands: tuple[Operand, ...], mode: str) -> Step:
    target, source, which, clamp, members = operands
    if (_number(clamp), _number(members)) != (31, -1):
        raise Fault("unknown instruction: a shuffle of a part of a warp")

    def execute(cta: Cta, mask: Mask) -> None:
        cta._whole_warps(mask)
        lane = cta.read(which, np.uint32).astype(np.int64)
        if mode == "bfly":
            lane = lane ^ cta.thread_ids
        cta.write(target, cta.read(source, np.uint32)[cta.warp_of * WARP + lane % WARP], mask)

    return execute


def _bits_of(operands: tuple[Operand, ...]) -> int:
    return next(each.bits for each in operands if isinstance(each, Register))


def _pack(operands: tuple[Operand, ...]) -> Step:
    target, parts = operands[0], _elements(operands[1])
    kind = TYPES[f"u{_bits_of(parts)}"]

    def execute(cta: Cta, mask: Mask) -> None:
        values = np.stack([cta.read(each, kind) for each in parts], axis=1)
        cta.write(target, values.view(f"uint{8 * values.itemsize * len(parts)}").reshape(-1), mask)

    return execute


def _unpack(operands: tuple[Operand, ...]) -> Step:
    targets, source = _elements(operands[0]), operands[1]
    kind = TYPES[f"u{_bits_of(targets)}"]
    whole = TYPES[f"u{_bits_of(targets) * len(targets)}"]

    def execute(cta: Cta, mask: Mask) -> None:
        values = cta.read(source, whole).copy().view(kind).reshape(cta.num_threads, -1)
        for target, part in zip(targets, values.T, strict=True):
            if target != Special("_"):
                cta.write(target, np.ascontiguousarray(part), mask)

    return execute
