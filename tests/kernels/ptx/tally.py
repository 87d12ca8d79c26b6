"""Counts what the memory instructions of a launch cost, as if no cache held anything between two of them.

Global memory is moved in sectors of 32 bytes. An access of a warp costs the sectors that its threads touch;
the least is as many as its distinct bytes fill. Shared memory has 32 banks of 4 bytes. A warp accesses it in
phases: one for accesses of up to 4 bytes by 32 threads, two for 8 bytes by 16 threads each, four for 16 bytes
by 8 threads each, and one for each matrix of ``ldmatrix``. A phase costs as many wavefronts as the bank with
the most distinct words has words; the least is one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
SECTOR = 32
"""Bytes of global memory that are moved as one."""
NUM_BANKS = 32
BANK_BYTES = 4
_WARP = 32
_ADDRESS_BITS = 48

Direction = Literal["read", "written"]


@dataclass
class GlobalTraffic:
    """What the accesses to one tensor cost.

    Attributes:
        accesses: instructions of warps with at least one active thread.
        num_bytes: distinct bytes of each access.
        sectors: sectors of each access.
        least_sectors: sectors that these bytes would fill.
        footprint: addresses of all sectors, divided by ``SECTOR``.
    """

    accesses: int = 0
    num_bytes: int = 0
    sectors: int = 0
    least_sectors: int = 0
    footprint: set[int] = field(default_factory=set)


@dataclass
class SharedTraffic:
    """What the accesses to shared memory by one kind of instruction cost."""

    accesses: int = 0
    wavefronts: int = 0
    least_wavefronts: int = 0


def count_sectors(addresses: Array, size: int, warps: Array) -> GlobalTraffic:
    """Count one instruction; ``addresses`` of active threads, each of ``size`` bytes and aligned to it."""
    warps = warps.astype(np.int64) << _ADDRESS_BITS
    addresses = addresses.astype(np.int64)
    elements = np.unique(warps | addresses // size)
    sectors = np.unique(warps | addresses // SECTOR)
    _, elements_per_warp = np.unique(elements >> _ADDRESS_BITS, return_counts=True)
    return GlobalTraffic(
        accesses=len(elements_per_warp),
        num_bytes=size * len(elements),
        sectors=len(sectors),
        least_sectors=int((-(-size * elements_per_warp // SECTOR)).sum()),
        footprint=set((sectors & ((1 << _ADDRESS_BITS) - 1)).tolist()),
    )


def count_wavefronts(addresses: Array, size: int, threads: Array) -> SharedTraffic:
    """Count one instruction; ``threads`` are the numbers of the active threads in their CTA.

    Of ``ldmatrix``, each row of a matrix counts as a thread.
    """
    threads_per_phase = _WARP * BANK_BYTES // max(size, BANK_BYTES)
    num_words = max(size // BANK_BYTES, 1)
    words = (addresses.astype(np.int64) // BANK_BYTES)[:, None] + np.arange(num_words)
    phases = np.broadcast_to((threads // threads_per_phase)[:, None], words.shape).astype(np.int64)
    distinct = np.unique(phases << _ADDRESS_BITS | words)
    phase, bank = distinct >> _ADDRESS_BITS, distinct % NUM_BANKS
    _, rows = np.unique(phase, return_inverse=True)
    words_of_bank = np.zeros((rows.max(initial=-1) + 1, NUM_BANKS), np.int64)
    np.add.at(words_of_bank, (rows, bank), 1)
    return SharedTraffic(
        accesses=len(np.unique(threads // _WARP)),
        wavefronts=int(words_of_bank.max(axis=1, initial=0).sum()),
        least_wavefronts=len(words_of_bank),
    )


class Tally:
    """Sums of a launch, by tensor and direction, and by kind and source line of instruction."""

    def __init__(self, tensors: Mapping[str, tuple[int, int]]) -> None:
        """``tensors`` are the addresses of each tensor's first byte and of the byte after its last one."""
        ordered = sorted(tensors.items(), key=lambda item: item[1])
        self._names = [name for name, _ in ordered]
        self._starts = np.array([start for _, (start, _) in ordered], np.uint64)
        self.in_global: dict[tuple[str, Direction], GlobalTraffic] = defaultdict(GlobalTraffic)
        self.in_shared: dict[tuple[str, str], SharedTraffic] = defaultdict(SharedTraffic)

    def add_global(self, direction: Direction, addresses: Array, size: int, threads: Array) -> None:
        if not len(addresses):
            return
        # All threads of an instruction access the same tensor.
        name = self._names[int(np.searchsorted(self._starts, addresses[0], side="right")) - 1]
        added = count_sectors(addresses, size, threads // _WARP)
        total = self.in_global[name, direction]
        total.accesses += added.accesses
        total.num_bytes += added.num_bytes
        total.sectors += added.sectors
        total.least_sectors += added.least_sectors
        total.footprint |= added.footprint

    def add_shared(self, kind: str, source: str, addresses: Array, size: int, threads: Array) -> None:
        if not len(addresses):
            return
        added = count_wavefronts(addresses, size, threads)
        total = self.in_shared[kind, source]
        total.accesses += added.accesses
        total.wavefronts += added.wavefronts
        total.least_wavefronts += added.least_wavefronts


_FLOATS = {"f16", "f32", "f64", "bf16", "f16x2", "bf16x2"}


def class_of(opcode: str) -> str:
    """Return the class of an instruction: what it mostly occupies."""
    name, *modifiers = opcode.split(".")
    kind = modifiers[-1] if modifiers else ""
    if name in ("ld", "st", "cp"):
        if "param" in modifiers:
            return "move"
        return "copy" if name == "cp" else modifiers[0]
    if name in ("mma", "ldmatrix", "shfl"):
        return {"mma": "tensor core", "ldmatrix": "shared", "shfl": "shuffle"}[name]
    if name in ("bra", "bar", "ret"):
        return "control"
    if name in ("mov", "cvt", "prmt"):
        return "move" if name == "mov" else "convert"
    if name in ("setp", "selp") or kind == "pred":
        return "predicate"
    if kind in _FLOATS:
        return "float"
    return "integer 64" if kind.endswith("64") or "wide" in modifiers else "integer 32"


def by_class(instructions: Counter[str]) -> Counter[str]:
    """Return counts by class of counts by opcode."""
    counts: Counter[str] = Counter()
    for opcode, count in instructions.items():
        counts[class_of(opcode)] += count
    return counts
