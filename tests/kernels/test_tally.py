"""The counters of the interpreter of PTX, on kernels by hand whose sectors and bank conflicts are known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: there are wheels only for Linux")

from tests.kernels.ptx.machine import Cta
from tests.kernels.ptx.memory import GlobalMemory, SharedMemory, extent
from tests.kernels.ptx.program import parse
from tests.kernels.ptx.tally import GlobalTraffic, SharedTraffic, Tally, by_class

PTX = """
.visible .entry kernel(.param .u64 kernel_param_0) .reqntid {num_threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    mov.u32 %r1, %tid.x;
    ld.param.u64 %rd1, [kernel_param_0];
    {body}
    ret;
}}
"""


def execute(body: str, memory: torch.Tensor, num_threads: int = 32) -> Tally:
    """Run one CTA of a kernel; ``%r1`` is the thread, ``%rd1`` the memory; shared memory has 8 KiB."""
    program = parse(PTX.format(body=body, num_threads=num_threads))
    tally = Tally({"memory": extent(memory)})
    shared = SharedMemory(8192, num_threads // 32)
    shared.is_written[:] = True
    parameters = {"kernel_param_0": memory.data_ptr()}
    Cta(program, parameters, GlobalMemory([memory]), shared, (0, 0, 0), (1, 1, 1), tally=tally).run()
    return tally


def aligned_zeros(num_bytes: int) -> torch.Tensor:
    """Return int32 zeros that begin at a multiple of 128 bytes."""
    whole = torch.zeros(num_bytes // 4 + 32, dtype=torch.int32)
    first = -whole.data_ptr() % 128 // 4
    return whole[first : first + num_bytes // 4]


# Bytes between threads, offset, access; sectors and the least for one warp.
GLOBAL_ACCESSES = [
    pytest.param(4, 0, "b32 %r3", 4, 4, id="next words"),
    pytest.param(4, 4, "b32 %r3", 5, 4, id="next words, not from a sector's start"),
    pytest.param(0, 0, "b32 %r3", 1, 1, id="one word for all"),
    pytest.param(8, 0, "b32 %r3", 8, 4, id="every other word"),
    pytest.param(32, 0, "b32 %r3", 32, 4, id="a word of each sector"),
    pytest.param(16, 0, "v4.b32 {%r3, %r4, %r5, %r6}", 16, 16, id="next vectors"),
    pytest.param(64, 16, "v4.b32 {%r3, %r4, %r5, %r6}", 32, 16, id="vectors apart"),
    pytest.param(2, 0, "b16 %rs3", 2, 2, id="next halves"),
]


@pytest.mark.parametrize(("stride", "offset", "access", "sectors", "least"), GLOBAL_ACCESSES)
def test_sectors_of_a_load_and_a_store(
    stride: int, offset: int, access: str, sectors: int, least: int
) -> None:
    kind, registers = access.split(" ", 1)
    address = f"mul.wide.u32 %rd2, %r1, {stride}; add.s64 %rd3, %rd1, %rd2;".replace("; ", ";\n")
    load = f"ld.global.{kind} {registers}, [%rd3+{offset}];"
    tally = execute(f"{address}\n{load}", aligned_zeros(4096))
    traffic = tally.in_global["memory", "read"]
    assert (traffic.accesses, traffic.sectors, traffic.least_sectors) == (1, sectors, least)
    assert len(traffic.footprint) == sectors
    if stride:
        store = f"st.global.{kind} [%rd3+{offset}], {registers};"
        written = execute(f"{address}\n{load}\n{store}", aligned_zeros(4096)).in_global["memory", "written"]
        assert (written.sectors, written.least_sectors) == (sectors, least)


def test_warps_are_counted_apart_and_the_footprint_once() -> None:
    load = "ld.global.b32 %r3, [%rd1];"
    traffic = execute(f"{load}\n{load}", aligned_zeros(128), num_threads=64).in_global["memory", "read"]
    assert (traffic.accesses, traffic.num_bytes, traffic.sectors) == (4, 16, 4)
    assert len(traffic.footprint) == 1


def test_threads_without_their_guard_count_nothing() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 8;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    @%p1 ld.global.b32 %r3, [%rd3];
    setp.lt.u32 %p2, %r1, 0;
    @%p2 ld.global.b32 %r3, [%rd3];
    """
    traffic = execute(body, aligned_zeros(128)).in_global["memory", "read"]
    assert (traffic.accesses, traffic.num_bytes, traffic.sectors) == (1, 32, 1)


# Bytes between threads, access; wavefronts and the least for one warp.
SHARED_ACCESSES = [
    pytest.param(4, "b32 %r3", 1, 1, id="next words"),
    pytest.param(0, "b32 %r3", 1, 1, id="one word for all"),
    pytest.param(2, "b16 %rs3", 1, 1, id="halves of the same words"),
    pytest.param(8, "b32 %r3", 2, 1, id="2 words of a bank"),
    pytest.param(32, "b32 %r3", 8, 1, id="8 words of a bank"),
    pytest.param(128, "b32 %r3", 32, 1, id="32 words of a bank"),
    pytest.param(132, "b32 %r3", 1, 1, id="rows with a pad"),
    pytest.param(8, "v2.b32 {%r3, %r4}", 2, 2, id="next pairs"),
    pytest.param(16, "v4.b32 {%r3, %r4, %r5, %r6}", 4, 4, id="next vectors"),
    pytest.param(128, "v4.b32 {%r3, %r4, %r5, %r6}", 32, 4, id="vectors of the same banks"),
    pytest.param(32, "v4.b32 {%r3, %r4, %r5, %r6}", 8, 4, id="every other vector"),
]


@pytest.mark.parametrize(("stride", "access", "wavefronts", "least"), SHARED_ACCESSES)
def test_bank_conflicts_of_a_load_and_a_store(stride: int, access: str, wavefronts: int, least: int) -> None:
    kind, registers = access.split(" ", 1)
    body = f"mul.lo.s32 %r2, %r1, {stride};\nld.shared.{kind} {registers}, [%r2];"
    expected = SharedTraffic(1, wavefronts, least)
    assert list(execute(body, aligned_zeros(128)).in_shared.values()) == [expected]
    if stride:
        body = f"{body}\nbar.sync 0;\nst.shared.{kind} [%r2], {registers};"
        assert list(execute(body, aligned_zeros(128)).in_shared.values()) == [expected, expected]


# Bytes between the rows of a matrix.
@pytest.mark.parametrize(("stride", "wavefronts"), [(16, 4), (128, 32), (144, 4), (64, 16)])
def test_bank_conflicts_of_matrices(stride: int, wavefronts: int) -> None:
    body = f"mul.lo.s32 %r2, %r1, {stride};\n"
    body += "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4, %r5, %r6}, [%r2];"
    assert list(execute(body, aligned_zeros(128)).in_shared.values()) == [SharedTraffic(1, wavefronts, 4)]


def test_an_asynchronous_copy_reads_sectors_and_writes_banks() -> None:
    body = """
    mul.wide.u32 %rd2, %r1, 16;
    add.s64 %rd3, %rd1, %rd2;
    mul.lo.s32 %r2, %r1, 128;
    setp.lt.u32 %p1, %r1, 8;
    selp.b32 %r3, 16, 0, %p1;
    cp.async.cg.shared.global [%r2], [%rd3], 16, %r3;
    cp.async.commit_group;
    cp.async.wait_group 0;
    """
    tally = execute(body, aligned_zeros(512))
    # Only eight threads read, and all of them write.
    traffic = tally.in_global["memory", "read"]
    assert (traffic.accesses, traffic.num_bytes, traffic.sectors, traffic.least_sectors) == (1, 128, 4, 4)
    assert list(tally.in_shared.values()) == [SharedTraffic(1, 32, 4)]


def test_traffic_is_counted_for_each_tensor() -> None:
    tally = Tally({"high": (4096, 8192), "low": (1024, 2048)})
    threads = np.arange(32)
    tally.add_global("read", 1024 + 4 * threads, 4, threads)
    tally.add_global("written", 8000 + 0 * threads, 4, threads)
    assert tally.in_global == {
        ("low", "read"): GlobalTraffic(1, 128, 4, 4, {32, 33, 34, 35}),
        ("high", "written"): GlobalTraffic(1, 4, 1, 1, {250}),
    }


def test_instructions_have_a_class() -> None:
    opcodes = {
        "ld.param.b64": "move",
        "mov.b32": "move",
        "ld.global.v4.b32": "global",
        "cp.async.cg.shared.global": "copy",
        "st.shared.b32": "shared",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "shared",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "tensor core",
        "shfl.sync.bfly.b32": "shuffle",
        "bar.sync": "control",
        "cvt.rn.bf16x2.f32": "convert",
        "selp.f32": "predicate",
        "and.pred": "predicate",
        "fma.rn.f32": "float",
        "mad.wide.s32": "integer 64",
        "add.s64": "integer 64",
        "shl.b32": "integer 32",
    }
    assert by_class(Counter(opcodes.keys())) == Counter(opcodes.values())
