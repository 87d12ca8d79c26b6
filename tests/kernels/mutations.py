"""Faults in PTX, one at a time, which the emulator or the comparison with the reference must catch."""

from __future__ import annotations

import re
from typing import NamedTuple

_REST = r"[^;\n]*"


class Mutant(NamedTuple):
    """A kernel with one fault, and the instruction that it changes."""

    place: str
    ptx: str


class Mutation(NamedTuple):
    """A kind of fault: an instruction that matches ``pattern`` is replaced.

    Attributes:
        num_sites: mutants, evenly distributed over the matches; 0 means all of them.
        needs: what a kernel must contain for the fault to matter.
        is_redundant_somewhere: kernels may have such instructions that are not needed for some tiles.
        is_in_partial_tile: the fault matters only where a tile has unused rows.
    """

    name: str
    pattern: str
    replacement: str
    num_sites: int = 1
    needs: str = ""
    is_redundant_somewhere: bool = False
    is_in_partial_tile: bool = False

    def mutants(self, ptx: str) -> list[Mutant]:
        """Return mutants of a kernel; none where the kernel has no such instruction."""
        if not re.search(self.needs, ptx):
            return []
        found = list(re.finditer(self.pattern, ptx))
        step = max(1, len(found) // self.num_sites) if self.num_sites else 1
        chosen = found[::step][: self.num_sites or None]
        return [
            Mutant(
                f"line {ptx.count(chr(10), 0, each.start()) + 1}: {each[0].splitlines()[0]}",
                ptx[: each.start()] + each.expand(self.replacement) + ptx[each.end() :],
            )
            for each in chosen
        ]


MUTATIONS = (
    Mutation("a barrier is missing", r"bar\.sync \t0;", "", 0, is_redundant_somewhere=True),
    Mutation("a wait for copies is missing", rf"cp\.async\.wait_group{_REST};", "", 0),
    Mutation("a wait leaves every group open", r"(cp\.async\.wait_group)\s+\d+;", r"\1 99;", 0),
    # Where every wait is for all groups, copies may belong to the next group.
    Mutation("a group is not closed", r"cp\.async\.commit_group;", "", needs=r"wait_group\s+[1-9]"),
    Mutation("a copy is missing", rf"(?:@%p\d+ )?cp\.async\.c[ag]{_REST};", ""),
    Mutation("a copy ignores its source size", rf"(cp\.async\.cg{_REST}), %r\d+;", r"\1;"),
    Mutation("a load has no guard", r"@%p\d+ (ld\.global\.v)", r"\1", is_in_partial_tile=True),
    Mutation("a store has no guard", r"@%p\d+ (st\.global)", r"\1", is_in_partial_tile=True),
    Mutation("a guard of a store is inverted", r"@%p(\d+ st\.global\.v)", r"@!%p\1"),
    # Where two masks follow each other, the second one hides all that the first one does.
    Mutation(
        "a mask of logits is dropped",
        r"selp\.f32 (\t(%r\d+), %r\d+), 0fFF800000, %p\d+;(?!\n.*selp\.f32 \t%r\d+, \2, )",
        r"mov.b32 \1;",
    ),
    Mutation("a swizzle is wrong", rf"(xor\.b32 {_REST}, )(?:16|32|64);", r"\g<1>128;", 0),
    Mutation("ldmatrix reads other rows", r"(ldmatrix[^;\n]*\[%r\d+)(?:\+\d+)?\]", r"\1+16]"),
    Mutation("ldmatrix does not transpose", r"\.trans\.shared", ".shared"),
    Mutation("registers of A are exchanged", r"(mma[^;{]*\{[^}]*\}, \{) (%r\d+), (%r\d+)", r"\1 \3, \2"),
    Mutation(
        "registers of B are exchanged",
        r"(mma[^;{]*\{[^}]*\}, \{[^}]*\}, \{) (%r\d+), (%r\d+) \}",
        r"\1 \3, \2 }",
    ),
    Mutation(
        "a sum leaves out lanes",
        r"(shfl\.sync\.bfly\.b32 \t%r\d+, %r\d+), \d+(,.*\n(?:.*\n){1,4}?\tadd\.f32)",
        r"\1, 0\2",
    ),
    Mutation("a load of a vector is shifted", r"(ld\.global\.v\d\.b32 [^[]*\[ %rd\d+ \+) 0", r"\1 16"),
    Mutation("two halves are exchanged", r"(cvt\.rn\.bf16x2\.f32 \t%r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
    Mutation("a branch is inverted", r"@%p(\d+ bra)", r"@!%p\1", 0),
)
