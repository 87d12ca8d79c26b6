"""The Triton kernels as compiled for sm_80, executed by an interpreter of PTX, against the reference.

Run with ``-s`` to see what was executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are wheels only for Linux")
if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels run there", allow_module_level=True)

import triton
import triton.language as tl

from quire.kernels.quantization import KV_FORMATS
from quire.kernels.triton import blocks, configs
from quire.kernels.triton.quantization_kernels import decode_values
from tests.kernels import triton_kernels as interpreted
from tests.kernels.mutations import MUTATIONS, Mutation
from tests.kernels.ptx import fragments
from tests.kernels.ptx.arithmetic import find_operation, round_to_bfloat16
from tests.kernels.ptx.launch import Emulator, Launch, installed
from tests.kernels.ptx.memory import SharedMemory
from tests.kernels.ptx.program import Fault, parse
from tests.kernels.triton_kernels import FEATURES, TOLERANCE, Case, Layout, Lengths

pytestmark = pytest.mark.usefixtures("no_garbage_collection", "poisoned_memory")

TYPES_IN_TRITON = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*u8",
}
QUERIES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
FORMATS = pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)


@pytest.fixture(scope="module")
def executed() -> Iterator[list[tuple[str, Launch]]]:
    """Collects (features, launch), and prints what ran in the end."""
    launches: list[tuple[str, Launch]] = []
    yield launches
    totals: Counter[tuple[str, ...]] = Counter()
    for features, launch in launches:
        kinds = (launch.types.get(name, "") for name in ("query", "kv"))
        totals[launch.kernel, *kinds, features] += launch.instructions.total()
    print()
    for (kernel, query, kv, features), count in sorted(totals.items()):
        print(f"{kernel:16} query {query:5} kv {kv:5} {features:12} {count:8} instructions of warps")
    opcodes = Counter[str]()
    for _, launch in launches:
        opcodes += launch.instructions
    print(f"{opcodes.total()} instructions of warps, {len(opcodes)} opcodes: {', '.join(sorted(opcodes))}")


def short_splits(*key: Any) -> configs.AttentionConfig:
    """Return a row with small tiles and the shipped pipeline, so that short sequences fill the pipeline."""
    row = configs.find_config(*key)
    if row.kernel == "prefill":
        return replace(row, block_m=32, block_n=16, num_warps=4)
    return replace(row, block_n=32, split_tokens=128)


def check_attention(
    case: Case, features: dict[str, Any], tolerance: float, **launch: Any
) -> dict[str, Launch]:
    """Write and attend, compare with the reference, and return the launches by kernel."""
    emulator = Emulator()
    with installed(emulator):
        interpreted.compare(interpreted.write(case), tolerance, **features, **launch)
    return {each.kernel: each for each in emulator.launches}


@QUERIES
@FORMATS
@pytest.mark.parametrize("features", ["plain", "all"])
def test_shipped_configurations_equal_the_reference(
    dtype: torch.dtype, stored: torch.dtype | None, features: str, executed: list[tuple[str, Launch]]
) -> None:
    lengths: Lengths = [(0, 5), (37, 1), (5, 0), (20, 20)]
    tolerance = 2e-2 if stored else TOLERANCE[dtype]
    case = interpreted.make_case(lengths, Layout(num_kv_heads=1), dtype=dtype, stored=stored, group=4)
    launches = check_attention(case, FEATURES[features], tolerance)
    executed += [(features, each) for each in launches.values()]
    for kernel in ("prefill_kernel", "decode_kernel"):
        assert launches[kernel].types["query"] == TYPES_IN_TRITON[dtype]
        assert launches[kernel].types["kv"] == TYPES_IN_TRITON[stored or dtype]
        assert launches[kernel].instructions.total() > 1000
    assert launches["write_kv_kernel"].instructions.total() > 1000


@pytest.mark.parametrize("features", FEATURES)
def test_many_tiles_and_splits_equal_the_reference(features: str, executed: list[tuple[str, Launch]]) -> None:
    case = interpreted.make_case([(19, 21), (140, 1)], Layout(num_kv_heads=1), dtype=torch.bfloat16, group=4)
    launches = check_attention(case, FEATURES[features], 2e-2, find_config=short_splits)
    executed += [(features, each) for each in launches.values()]
    # With a window, the sequence has one split.
    assert ("combine_kernel" in launches) == ("sliding_window" not in FEATURES[features])


@triton.jit  # type: ignore[untyped-decorator]
def decode_bytes(bits, values, KV_FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, 256)
    stored = tl.load(bits + index)
    decoded = decode_values(stored, values.dtype.element_ty, KV_FORMAT)
    tl.store(values + index, decoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_8_bit_value_is_decoded_exactly(dtype: torch.dtype, stored: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    values = torch.empty(256, dtype=dtype)
    with installed(Emulator()):
        decode_bytes[(1,)](
            bits.view(torch.int8) if stored == torch.int8 else bits, values, KV_FORMATS[stored].name
        )
    expected = bits.view(stored).to(dtype)
    # No block holds a NaN of e4m3.
    is_number = ~expected.isnan()
    assert torch.equal(values[is_number], expected[is_number])


@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_other_head_dims_equal_the_reference(head_dim: int, executed: list[tuple[str, Launch]]) -> None:
    layout = Layout(num_kv_heads=1, head_dim=head_dim, block_size=32)
    case = interpreted.make_case([(37, 1), (3, 9)], layout, dtype=torch.bfloat16, group=3)
    launches = check_attention(case, {}, 2e-2)
    executed += [(f"head_dim {head_dim}", each) for each in launches.values()]


@FORMATS
def test_latents_equal_the_reference(stored: torch.dtype | None, executed: list[tuple[str, Launch]]) -> None:
    layout = interpreted.LATENTS
    case = interpreted.make_case([(37, 1), (3, 9)], layout, dtype=torch.bfloat16, stored=stored, group=4)
    launches = check_attention(case, {}, 2e-2)
    executed += [("latents", each) for each in launches.values()]


@pytest.mark.parametrize("lengths", [[(140, 1)], [(19, 21)]], ids=["decode", "prefill"])
def test_the_order_of_warps_and_blocks_does_not_matter(lengths: Lengths) -> None:
    case = interpreted.make_case(lengths, Layout(num_kv_heads=1), dtype=torch.bfloat16, group=4)
    outputs = []
    for order in (None, np.random.default_rng(0), np.random.default_rng(1)):
        with installed(Emulator(order)):
            interpreted.write(case)
            outputs.append(interpreted.attend(case, find_config=short_splits))
    assert torch.equal(outputs[1], outputs[0])
    assert torch.equal(outputs[2], outputs[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_blocks_are_copied(dtype: torch.dtype, executed: list[tuple[str, Launch]]) -> None:
    emulator = Emulator()
    memory = torch.randn(9, 5000)
    expected = memory.clone()
    expected[[7, 0]] = memory[[2, 5]]
    ids = torch.tensor([8, 3, 3, 0], dtype=dtype)
    out = torch.empty(4, 5000)
    with installed(emulator):
        blocks.copy_blocks(memory, torch.tensor([[2, 7], [5, 0]], dtype=dtype))
        assert torch.equal(memory, expected)
        blocks.gather_blocks(memory, ids, out)
        assert torch.equal(out, memory[ids.long()])
        blocks.scatter_blocks(out[:2], torch.tensor([1, 4], dtype=dtype), memory)
    expected[[1, 4]] = out[:2]
    assert torch.equal(memory, expected)
    executed += [(str(dtype), each) for each in emulator.launches]


def mutated_case(kernel: str, is_partial: bool) -> tuple[Case, dict[str, Any]]:
    """Return a case in which every instruction matters, and its features.

    In decode one sequence has two splits, the last one a single key, and one has one split; unless
    ``is_partial``, every row of a tile is in use. In prefill the diagonal meets tiles at all positions, and
    the second sequence's tile has unused rows. Block 0, which masked entries of a table stand for,
    is not in use and holds NaN.
    """
    is_decode = kernel == "decode_kernel"
    group = (4 if is_partial else 16) if is_decode else 1
    lengths: Lengths = [(128, 1), (20, 1)] if is_decode else [(44, 32), (20, 4)]
    for seed in range(20):
        case = interpreted.make_case(
            lengths, Layout(num_kv_heads=1), dtype=torch.bfloat16, group=group, seed=seed
        )
        if (case.metadata.block_tables != 0).all():
            return case, {"alibi_slopes": torch.linspace(0.1, 0.01, group)} if is_decode else {}
    raise AssertionError("block 0 is always in use")


class Mutants:
    """Runs mutants of one kernel of a step."""

    def __init__(self, kernel: str, is_partial: bool = False) -> None:
        self.case, self.features = mutated_case(kernel, is_partial)
        texts: dict[str, str] = {}

        def keep(ptx: str) -> str:
            texts[parse(ptx).name] = ptx
            return ptx

        with installed(Emulator(mutate=keep)):
            interpreted.write(self.case)
            self.output = interpreted.attend(self.case, find_config=short_splits, **self.features)
        self.expected = interpreted.attend_reference(self.case, **self.features)
        torch.testing.assert_close(self.output, self.expected, rtol=1e-2, atol=1e-2)
        self.ptx = texts[kernel]

    def run(self, mutant: str, order: np.random.Generator | None = None) -> torch.Tensor:
        emulator = Emulator(order, lambda ptx: mutant if ptx == self.ptx else ptx)
        with installed(emulator):
            return interpreted.attend(self.case, find_config=short_splits, **self.features)

    def is_caught(self, mutant: str) -> bool:
        try:
            output = self.run(mutant)
        except Fault:
            return True
        return not torch.allclose(output, self.expected, rtol=1e-2, atol=1e-2)


mutants_of = cache(Mutants)


@pytest.mark.parametrize("kernel", ["decode_kernel", "prefill_kernel"])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutations_are_caught(kernel: str, mutation: Mutation) -> None:
    mutants = mutants_of(kernel, mutation.is_in_partial_tile)
    candidates = mutation.mutants(mutants.ptx)
    if not candidates:
        pytest.skip("the kernel has no such instruction")
    survivors = [each for each in candidates if not mutants.is_caught(each.ptx)]
    num_caught = len(candidates) - len(survivors)
    print(f"{kernel}: {mutation.name}: {num_caught} of {len(candidates)} mutants are caught")
    if mutation.is_redundant_somewhere:
        # Triton's barriers that order nothing with these tiles: no order of warps may change a bit.
        assert num_caught > len(candidates) // 2
        for each in survivors:
            assert torch.equal(mutants.run(each.ptx, np.random.default_rng(0)), mutants.output)
    else:
        assert not [each.place for each in survivors]


def test_every_mutation_applies_to_some_kernel() -> None:
    texts = [mutants_of(kernel, False).ptx for kernel in ("decode_kernel", "prefill_kernel")]
    unused = [mutation.name for mutation in MUTATIONS if not any(map(mutation.mutants, texts))]
    assert not unused


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(Fault, match=r"unknown instruction: tanh\.approx\.f32"):
        find_operation("tanh.approx.f32")


# Opcode, operands as bits, result as bits; from the PTX manual.
EXAMPLES = [
    ("add.s32", (0x7FFFFFFF, 1), 0x80000000),
    ("mul.lo.s32", (0x10000, 0x10001), 0x10000),
    ("div.s32", (-7 & 0xFFFFFFFF, 2), -3 & 0xFFFFFFFF),
    ("shr.s32", (0x80000000, 40), 0xFFFFFFFF),
    ("shr.u32", (0x80000000, 32), 0),
    ("shl.b32", (1, 32), 0),
    ("bfe.u32", (0xABCD1234, 8, 8), 0x12),
    ("bfe.s32", (0x10, 4, 1), 0xFFFFFFFF),
    ("prmt.b32", (0x33221100, 0x77665544, 0x7632), 0x77663322),
    ("prmt.b32", (0x80, 0, 0x8888), 0xFFFFFFFF),
    ("max.f32", (0x7FC00000, 0x3F800000), 0x3F800000),
    ("setp.ne.f32", (0x7FC00000, 0), 0),
    ("setp.neu.f32", (0x7FC00000, 0), 1),
    ("ex2.approx.ftz.f32", (0xFF800000,), 0),
    ("cvt.rn.bf16x2.f32", (0x3F800000, 0x40000000), 0x3F804000),
    ("cvt.rn.bf16.f32", (0x3F808000,), 0x3F80),
    ("cvt.rn.bf16.f32", (0x3F818000,), 0x3F82),
]


@pytest.mark.parametrize(("opcode", "operands", "expected"), EXAMPLES, ids=str)
def test_instructions_follow_the_manual(opcode: str, operands: tuple[int, ...], expected: int) -> None:
    operation = find_operation(opcode)
    values = [
        np.array([bits], np.uint64).astype(f"uint{8 * np.dtype(kind).itemsize}").view(kind)
        for bits, kind in zip(operands, operation.inputs, strict=True)
    ]
    with np.errstate(all="ignore"):
        result = operation.compute(*values)
    assert int(result.view(f"uint{8 * result.itemsize}")[0]) == expected


def test_fragments_of_random_matrices_multiply() -> None:
    generator = np.random.default_rng(0)
    a, b = (round_to_bfloat16(generator.normal(size=size).astype(np.float32)) for size in ((16, 16), (8, 16)))
    # The four 8 x 8 matrices of A in the order of a thread's registers; B is stored with its columns as rows.
    parts = [a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]]
    left = fragments.distribute(np.stack(parts)[None], False).transpose(1, 2, 0)
    right = fragments.distribute(np.stack([b[:, :8], b[:, 8:]])[None], False).transpose(1, 2, 0)
    product = fragments.multiply(
        np.ascontiguousarray(left), np.ascontiguousarray(right), np.zeros((1, 32, 4), np.float32), "bf16"
    )
    whole = np.empty((16, 8), np.float32)
    whole[fragments.C_ROWS, fragments.C_COLUMNS] = product[0]
    wide_a, wide_b = (fragments.WIDEN["bf16"](each) for each in (a, b))
    np.testing.assert_allclose(whole, wide_a @ wide_b.T, rtol=1e-5, atol=1e-5)


def test_a_warp_may_not_read_what_another_one_wrote_before_a_barrier() -> None:
    shared = SharedMemory(64, 2)
    address, first, second = np.array([16]), np.array([0]), np.array([1])
    with pytest.raises(Fault, match="never written"):
        shared.load(address, 4, first)
    shared.store(address, np.ones((1, 4), np.uint8), first)
    assert shared.load(address, 4, first).tolist() == [[1, 1, 1, 1]]
    with pytest.raises(Fault, match="a race: a read"):
        shared.load(address, 4, second)
    shared.pass_barrier()
    shared.load(address, 4, second)
    with pytest.raises(Fault, match="a race: a write"):
        shared.store(address, np.ones((1, 4), np.uint8), first)
    with pytest.raises(Fault, match="not aligned"):
        shared.load(np.array([2]), 4, first)
    with pytest.raises(Fault, match="outside shared memory"):
        shared.load(np.array([64]), 4, first)
