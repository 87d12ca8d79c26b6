"""Parses the PTX that Triton emits into basic blocks of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


class Fault(Exception):
    """The program did something that a correct kernel never does, or uses an unknown instruction."""


@dataclass(frozen=True)
class Register:
    """A register of each thread; a predicate has 1 bit."""

    name: str
    bits: int


@dataclass(frozen=True)
class Immediate:
    """A constant, as bits."""

    value: int


@dataclass(frozen=True)
class Special:
    """A read-only register such as ``%tid.x``, or the address of the program's shared memory."""

    name: str


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; the base of a parameter is its name."""

    base: Register | Special
    offset: int


Operand = Register | Immediate | Special | Address | tuple["Operand", ...]


@dataclass(frozen=True)
class Guard:
    """The predicate under which an instruction executes: ``@%p1`` or ``@!%p1``."""

    register: Register
    is_negated: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction; ``target`` is the label of a branch and ``source`` the line of the kernel."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    target: str | None
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.source}: {self.text}"


@dataclass(frozen=True)
class Program:
    """A kernel.

    Attributes:
        parameters: names of the parameters in order.
        num_threads: threads of a CTA.
        blocks: basic blocks. A branch, a barrier or a label ends a block.
        starts: index of the block that each label stands before.
    """

    name: str
    parameters: tuple[str, ...]
    num_threads: int
    blocks: tuple[tuple[Instruction, ...], ...]
    starts: Mapping[str, int]


_BITS_OF_SUFFIX = re.compile(r"\d+$")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+([%\w]+)<\d+>;")
_LOCATION = re.compile(r"//\s*(\S+\.py:\d+)")
_LABEL = re.compile(r"(\$\w+):")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*(?:::\w+)?)\s*(.*);$")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ENDS_A_BLOCK = re.compile(r"bra|ret|bar\.sync")


def parse(ptx: str) -> Program:
    """Parse a module with one kernel.

    Raises:
        Fault: a line that is not understood.
    """
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)", ptx, re.DOTALL)
    if not entry:
        raise Fault("expected one kernel with .reqntid")
    body = ptx[entry.end() :].split("$L__func_end", 1)[0]
    blocks: list[list[Instruction]] = [[]]
    starts: dict[str, int] = {}
    for item in _items(body):
        if isinstance(item, str):
            if blocks[-1]:
                blocks.append([])
            starts[item] = len(blocks) - 1
        else:
            blocks[-1].append(item)
            if _ENDS_A_BLOCK.match(item.opcode):
                blocks.append([])
    return Program(
        name=entry[1],
        parameters=tuple(re.findall(r"(\w+_param_\d+)", entry[2])),
        num_threads=int(entry[3]),
        blocks=tuple(tuple(block) for block in blocks),
        starts=starts,
    )


def _items(body: str) -> Iterator[Instruction | str]:
    """Yield the instructions and labels of a kernel's body."""
    bits = {"%p": 1}
    for kind, prefix in _REGISTERS.findall(body):
        bits[prefix] = 1 if kind == "pred" else int(_suffix(kind))
    source = "unknown line"
    for line in body.splitlines():
        if location := _LOCATION.search(line):
            source = location[1]
        text = line.split("//", 1)[0].strip()
        if not text or text in "{}" or text.startswith("."):
            continue
        if label := _LABEL.match(text):
            if not label[1].startswith("$L__tmp"):
                yield label[1]
            continue
        yield _instruction(text, source, bits)


def _instruction(text: str, source: str, bits: Mapping[str, int]) -> Instruction:
    found = _INSTRUCTION.match(text)
    if not found:
        raise Fault(f"{source}: not understood: {text}")
    negation, guard, opcode, rest = found.groups()
    is_branch = opcode.startswith("bra")
    return Instruction(
        opcode=opcode,
        operands=() if is_branch else _operands(rest, bits),
        guard=Guard(Register(guard, 1), bool(negation)) if guard else None,
        target=rest.strip() if is_branch else None,
        source=source,
        text=text,
    )


def _operands(text: str, bits: Mapping[str, int]) -> tuple[Operand, ...]:
    return tuple(_operand(each.strip(), bits) for each in _OPERAND.findall(text))


def _operand(text: str, bits: Mapping[str, int]) -> Operand:
    if text.startswith("{"):
        return _operands(text[1:-1], bits)
    if text.startswith("["):
        base_text, _, offset = text[1:-1].replace(" ", "").partition("+")
        base = _operand(base_text, bits)
        if not isinstance(base, Register | Special):
            raise Fault(f"not an address: {text}")
        return Address(base, int(offset or "0", 0))
    if text.startswith("0f"):
        return Immediate(int(text[2:], 16))
    if re.match(r"-?\d", text):
        return Immediate(int(text.removesuffix("U"), 0))
    prefix = text.rstrip("0123456789")
    return Register(text, bits[prefix]) if prefix in bits else Special(text)


def _suffix(kind: str) -> str:
    found = _BITS_OF_SUFFIX.search(kind)
    if not found:
        raise Fault(f"a register of unknown size: {kind}")
    return found[0]
