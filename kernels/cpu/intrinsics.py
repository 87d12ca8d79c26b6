"""Instructions for the CPU kernels that Numba does not offer, written in LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.core import cgutils, config
from numba.extending import intrinsic

_FLOAT = ir.FloatType()
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
Values = dict[Any, Any]
"""LLVM's values by any key."""
CACHE_LINE = 64
STORAGE: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.int8: np.int8,
    torch.float8_e4m3fn: np.uint8,
}
"""NumPy type that stands for each dtype of torch in Numba; ``widen`` converts from these types."""
_SCALED = (types.int8, types.uint8)
"""Stored types that have a scale."""


def processor_features() -> Mapping[str, bool]:
    """Return the features, by LLVM's names, for which Numba compiles: the host's, unless others are set."""
    named = config.CPU_FEATURES  # type: ignore[attr-defined]
    if named is None:
        features: Mapping[str, bool] = binding.get_host_cpu_features()
        return features
    return {name[1:]: name[0] == "+" for name in named.split(",") if name}


TILE_ROWS = 4
TILE_COLUMNS = 64 if processor_features().get("avx512f", False) else 16
"""Size of the tile of sums that ``add_product`` keeps in registers.

4 x 64 sums take 16 registers of AVX-512, and 4 x 16 sums take 8 registers of AVX2.
"""

GROUP = 32
"""Inputs that share a scale in each column of a quantized weight."""
SQUARE = 16 if TILE_COLUMNS == 64 else 8
"""Largest side of the squares that ``transpose`` handles fast: the number of float32 in a register."""


def is_zen() -> bool:
    """Return whether Numba compiles for a processor of AMD, Zen or later."""
    name: str = config.CPU_NAME or binding.get_host_cpu_name()  # type: ignore[attr-defined]
    return name.startswith("znver")


def instruction(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Make an instruction from a function that returns a signature and emits LLVM IR.

    Address arithmetic on integers may begin at a null pointer, and LLVM removes such accesses because it
    assumes that they never happen. A kernel that LLVM had optimized twice lost a store in this way. The
    attribute makes null pointers valid, so LLVM keeps the accesses.
    """

    @wraps(emit)
    def with_null_pointers(*arguments: Any) -> Any:
        emitted = emit(*arguments)
        if emitted is None:
            return None
        signature, codegen = emitted

        def emit_instruction(context: Any, builder: Any, *rest: Any) -> Any:
            # llvmlite knows only some names of attributes, and checks them in ``add``.
            set.add(builder.function.attributes, "null_pointer_is_valid")
            return codegen(context, builder, *rest)

        return signature, emit_instruction

    instruction: Callable[..., Any] = intrinsic(prefer_literal=True)(with_null_pointers)
    return instruction


def constant_of(kind: Any, value_of: Callable[[Any], int]) -> Any:
    """Return an instruction whose result depends only on the type that its argument names.

    Args:
        kind: the Numba type of the result.
        value_of: returns the result for a Numba type.
    """

    def emit(typingctx: Any, stored: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return context.get_constant(kind, value_of(stored.dtype))

        return kind(stored), codegen

    return instruction(emit)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a kernel. It is inlined, so that loops over its constant arguments are unrolled.

    LLVM inlines it: Numba would copy and type the part again for each call, which takes twice as long. LLVM
    may not reorder or fuse operations, since the result would depend on the width of vectors.
    """
    return _part(function, forceinline=True)


def exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a kernel whose sums are computed in the order of the source code."""
    return _part(function)


def _part(function: Callable[..., Any], **options: bool) -> Callable[..., Any]:
    """Compile a function that only kernels call; a call from Python would end the process.

    It may not call itself: Numba finds such a function by its own machine code, which it has not.
    """
    jit: Any = njit  # its declared type lacks some of the options
    part: Callable[..., Any] = jit(
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options
    )(function)
    return part


@instruction
def pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    """Convert an address to a pointer to a NumPy type."""
    signature = types.CPointer(dtype.dtype)(types.int64, dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, codegen


@compiled
def in_lines(memory: Any, shape: Any, dtype: Any) -> Any:
    """Return an array in some memory, which begins with a cache line; ``keep`` the memory.

    Numba counts a reference to each array that a function gets, by two atomic operations, but none to this.

    Args:
        memory: an array of any type, with room for ``CACHE_LINE`` bytes more.
        shape, dtype: those of the array.
    """
    return carray(pointer((memory.ctypes.data + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE, dtype), shape)


@instruction
def keep(typingctx: Any, values: Any) -> Any:
    """Use some values, so that Numba does not free them before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.none(values), codegen


@instruction
def copy_floats(typingctx: Any, source: Any, target: Any, length: Any) -> Any:
    """Copy float32 values between addresses; LLVM copies short rows of a known length one by one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, right, left, arguments[2], 4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


@instruction
def item_bytes(typingctx: Any, storage: Any) -> Any:
    """Return the bytes of a value of a NumPy type."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(_INT64, storage.dtype.bitwidth // 8)

    return types.int64(storage), codegen


@instruction
def keep_apart(typingctx: Any) -> Any:
    """Prevent LLVM from inlining the function that contains this: inlining large functions takes minutes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), codegen


@instruction
def call(typingctx: Any, function: Any, values: Any) -> Any:
    """Call ``void function(int64_t, ...)`` at an address with a tuple of int64, such as addresses."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function_type = ir.FunctionType(ir.VoidType(), [_INT64] * len(values))
        address = builder.inttoptr(arguments[0], function_type.as_pointer())
        builder.call(address, cgutils.unpack_tuple(builder, arguments[1]))
        return context.get_dummy_value()

    return types.none(types.int64, values), codegen


@instruction
def call_for_int(typingctx: Any, function: Any) -> Any:
    """Call ``int function(void)`` at an address, and return its result."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function_type = ir.FunctionType(_INT32, [])
        result = builder.call(builder.inttoptr(arguments[0], function_type.as_pointer()), [])
        return builder.sext(result, _INT64)

    return types.int64(types.int64), codegen


@instruction
def arrive(typingctx: Any, address: Any) -> Any:
    """Add 1 to an int64 counter that threads share. This thread's earlier writes become visible first."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_INT64, 1), "seq_cst")

    return types.int64(types.int64), codegen


@instruction
def read_shared(typingctx: Any, address: Any) -> Any:
    """Return an int64 counter that threads share. All writes before their ``arrive`` are visible then."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.load_atomic(counter, "seq_cst", 8)

    return types.int64(types.int64), codegen


@instruction
def raise_shared(typingctx: Any, address: Any, value: Any) -> Any:
    """Raise an int64 that threads share to a value, unless it is larger."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("max", number, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@instruction
def fetch_and_increment(typingctx: Any, address: Any) -> Any:
    """Return the value of an int64 counter that threads share, and add 1 to it atomically."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_INT64, 1), "monotonic")

    return types.int64(types.int64), codegen


def emit_prefetch(builder: Any, address: Any, *, is_read_once: bool = False) -> None:
    """Emit the instruction that prefetches a cache line.

    Args:
        is_read_once: whether the line should displace nothing from the larger caches.
    """
    byte_pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    # In order: it is for reading, from no cache (0) to all caches (3) are to keep it, and it is data.
    constants = [ir.Constant(_INT32, value) for value in (0, 0 if is_read_once else 3, 1)]
    builder.call(function, [builder.inttoptr(address, byte_pointer), *constants])


def emit_loop(builder: Any, count: Any, starts: Values, body: Callable[[Any, Values], Values]) -> Values:
    """Emit ``for index in range(count): sums = body(index, sums)``; return the last sums.

    The body runs at least once.
    """
    before = builder.block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_INT64)
    sums = {each: builder.phi(start.type) for each, start in starts.items()}
    results = body(index, sums)
    end, following = builder.block, builder.add(index, ir.Constant(_INT64, 1))
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    index.add_incoming(ir.Constant(_INT64, 0), before)
    index.add_incoming(following, end)
    for each, total in sums.items():
        total.add_incoming(starts[each], before)
        total.add_incoming(results[each], end)
    builder.position_at_end(after)
    return results


@instruction
def widen(typingctx: Any, stored: Any) -> Any:
    """Convert a stored value to float32.

    Stored types are float32, bfloat16 bits as uint16, float16 bits as int16, int8, and e4m3 bits as uint8.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return widened(builder, stored, arguments[0])

    return types.float32(stored), codegen


def widened_vector(builder: Any, stored: Any, values: Any) -> Any:
    return widened(builder, stored, values, values.type.count)


def widened(builder: Any, stored: Any, value: Any, lanes: int = 0) -> Any:
    """Emit the conversion of a stored value to float32, or of a vector if ``lanes`` is above 0."""

    def wide(kind: Any) -> Any:
        return ir.VectorType(kind, lanes) if lanes else kind

    def constant(kind: Any, number: float) -> Any:
        return ir.Constant(wide(kind), [number] * lanes if lanes else number)

    if stored == types.uint16:
        high_half = builder.shl(builder.zext(value, wide(_INT32)), constant(_INT32, 16))
        return builder.bitcast(high_half, wide(_FLOAT))
    if stored == types.int16:
        return builder.fpext(builder.bitcast(value, wide(ir.HalfType())), wide(_FLOAT))
    if stored == types.int8:
        return builder.sitofp(value, wide(_FLOAT))
    if stored == types.uint8:
        # As bits of a float16, they represent 2^-8 times the value.
        bits = builder.zext(value, wide(_INT16))
        sign = builder.shl(builder.and_(bits, constant(_INT16, 0x80)), constant(_INT16, 8))
        rest = builder.shl(builder.and_(bits, constant(_INT16, 0x7F)), constant(_INT16, 7))
        half = builder.fpext(builder.bitcast(builder.or_(sign, rest), wide(ir.HalfType())), wide(_FLOAT))
        return builder.fmul(half, constant(_FLOAT, 256.0))
    return value


@instruction
def encode(typingctx: Any, value: Any, stored: Any) -> Any:
    """Round a float32 to a stored type of at least 16 bits, half to even; the inverse of ``widen``."""
    stored_type = stored.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x = arguments[0]
        if stored_type == types.int16:
            return builder.bitcast(builder.fptrunc(x, ir.HalfType()), _INT16)
        if stored_type != types.uint16:
            return x
        bits = builder.bitcast(x, _INT32)
        last_kept_bit = builder.and_(builder.lshr(bits, ir.Constant(_INT32, 16)), ir.Constant(_INT32, 1))
        rounded = builder.add(bits, builder.add(last_kept_bit, ir.Constant(_INT32, 0x7FFF)))
        # A NaN must not overflow into another number.
        is_nan = builder.fcmp_unordered("uno", x, x)
        rounded = builder.select(is_nan, ir.Constant(_INT32, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(rounded, ir.Constant(_INT32, 16)), _INT16)

    return stored_type(types.float32, stored), codegen


def fused(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """Emit ``left * right + addend`` of float vectors, rounded once."""
    vector = addend.type
    function_type = ir.FunctionType(vector, [vector] * 3)
    name = f"llvm.fma.v{vector.count}f32"
    return builder.call(
        cgutils.get_or_insert_function(builder.module, function_type, name), [left, right, addend]
    )


@instruction
def multiply_add(typingctx: Any, left: Any, right: Any, addend: Any) -> Any:
    """Return ``left * right + addend`` of float32, rounded once on every processor."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@instruction
def transpose(
    typingctx: Any,
    source: Any,
    source_stride: Any,
    target: Any,
    target_stride: Any,
    scale: Any,
    stored: Any,
    size: Any,
) -> Any:
    """Write a square of stored values as float32, transposed, widened and scaled, in registers only.

    ``target[c, r] = scale * widen(source[r, c])`` for ``r, c < size``. From uint32, as the name of pairs of
    bfloat16, it is the pair of ``source[2 * r, c]`` and ``source[2 * r + 1, c]``, without any change.

    Args:
        source, target: addresses.
        source_stride, target_stride: elements from one row to the next.
        scale: float32; used only if the stored type has 8 bits.
        stored: the NumPy type of the source.
        size: the number of rows and columns, a power of two and a literal.
    """
    if not isinstance(size, types.IntegerLiteral):
        return None
    num = size.literal_value
    stored_type = stored.dtype

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_at, from_stride, target_at, to_stride, factor, _, _ = arguments
        are_pairs = stored_type == types.uint32
        element = _INT16 if are_pairs else context.get_value_type(stored_type)
        source_row = builder.inttoptr(source_at, element.as_pointer())
        target_row = builder.inttoptr(target_at, _FLOAT.as_pointer())
        vector = ir.VectorType(_FLOAT, num)
        factors = splat(builder, factor, num)
        rows = []
        for _ in range(2 * num if are_pairs else num):
            row_at = builder.bitcast(source_row, ir.VectorType(element, num).as_pointer())
            row = widened_vector(builder, stored_type, builder.load(row_at, align=1))
            rows.append(builder.fmul(row, factors) if stored_type in _SCALED else row)
            source_row = builder.gep(source_row, [from_stride])
        if are_pairs:
            lanes = [lane for i in range(num) for lane in (i, num + i)]
            mask = ir.Constant(ir.VectorType(_INT32, 2 * num), lanes)
            halves = zip(rows[::2], rows[1::2], strict=True)
            rows = [builder.bitcast(builder.shuffle_vector(*each, mask), vector) for each in halves]
        for column in _transposed(builder, rows):
            builder.store(column, builder.bitcast(target_row, vector.as_pointer()), align=4)
            target_row = builder.gep(target_row, [to_stride])
        return context.get_dummy_value()

    return types.none(
        types.int64, types.int64, types.int64, types.int64, types.float32, stored, size
    ), codegen


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Emit the transposition of a square: interleave its upper and lower half, log2(size) times."""
    num = len(rows)
    if num == 1:
        return rows
    if num == 8:
        return _transposed_by_eight(builder, rows)
    lanes = ir.VectorType(_INT32, num)
    halves = (range(num // 2), range(num // 2, num))
    masks = [ir.Constant(lanes, [lane for i in half for lane in (i, num + i)]) for half in halves]
    for _ in range(num.bit_length() - 1):
        pairs = zip(rows[: num // 2], rows[num // 2 :], strict=True)
        rows = [builder.shuffle_vector(first, second, mask) for first, second in pairs for mask in masks]
    return rows


def _transposed_by_eight(builder: Any, rows: list[Any]) -> list[Any]:
    """Emit the transposition of 8 rows of 8. In AVX2, shuffles within halves of vectors cost half as much."""

    def shuffled(first: Any, second: Any, lanes: list[int]) -> Any:
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_INT32, 8), lanes))

    pairs = [(rows[index], rows[index + 1]) for index in (0, 2, 4, 6)]
    low = [shuffled(*pair, [0, 8, 1, 9, 4, 12, 5, 13]) for pair in pairs]
    high = [shuffled(*pair, [2, 10, 3, 11, 6, 14, 7, 15]) for pair in pairs]
    fours = []
    for half in (0, 2):
        for part in (low, high):
            fours.append(shuffled(part[half], part[half + 1], [0, 1, 8, 9, 4, 5, 12, 13]))
            fours.append(shuffled(part[half], part[half + 1], [2, 3, 10, 11, 6, 7, 14, 15]))
    upper, lower = fours[:4], fours[4:]
    return [
        shuffled(above, below, lanes)
        for lanes in ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
        for above, below in zip(upper, lower, strict=True)
    ]


def splat(builder: Any, scalar: Any, num: int) -> Any:
    vector, lanes = ir.VectorType(scalar.type, num), ir.VectorType(_INT32, num)
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(lanes, None))


@instruction
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), codegen


@instruction
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as int32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), codegen


@compiled
def exp(x: np.float32) -> np.float32:
    """Return e**x for x <= 0 within 2 units in the last place; unlike libm's function, it vectorizes.

    The result is 2**n * 2**f: the integer n goes into the exponent bits, and a polynomial gives 2**f for f in
    [-1/2, 1/2] (coefficients of Cephes' ``exp2f``). Results below the smallest normal number become that
    number.
    """
    y = max(x, np.float32(-87.0)) * np.float32(1.4426950408889634)
    n = np.floor(y + np.float32(0.5))
    f = y - n
    p = np.float32(1.535336188319500e-4)
    p = multiply_add(p, f, np.float32(1.339887440266574e-3))
    p = multiply_add(p, f, np.float32(9.618437357674640e-3))
    p = multiply_add(p, f, np.float32(5.550332471162809e-2))
    p = multiply_add(p, f, np.float32(2.402264791363012e-1))
    p = multiply_add(p, f, np.float32(6.931472028550421e-1))
    p = multiply_add(p, f, np.float32(1.0))
    power: np.float32 = p * float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return power


@instruction
def add_product(
    typingctx: Any,
    total: Any,
    left: Any,
    right: Any,
    depth: Any,
    strides: Any,
    scale: Any,
    coming: Any,
    rows: Any,
    width: Any,
    stored: Any,
    step: Any,
) -> Any:
    """Add a matrix product to ``total[rows, width]``, with all sums in registers.

    ``total[r, c] += sum over k < depth of left[r, k] * scale * widen(right[k, c])``: the inner loop of a
    matrix product (Goto and van de Geijn, 2008). LLVM does not generate this code from plain loops. A sum
    runs over k in order, so its bits do not depend on the tiles.

    Args:
        total, left, right: addresses; total and left are float32.
        depth: number of products in a sum.
        strides: elements from one row to the next, of total, left and right.
        scale: float32; used only if right has 8 bits.
        coming: two addresses. For each k, ``step`` bytes are prefetched from both.
        rows: number of rows, a literal.
        width: number of columns, a literal.
        stored: the NumPy type of right.
        step: number of bytes, a literal; 0 prefetches nothing.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (rows, width, step)):
        return None
    num_rows, columns, step_bytes = rows.literal_value, width.literal_value, step.literal_value
    stored_type = stored.dtype
    vector = ir.VectorType(_FLOAT, columns)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total_address, left_address, right_address, depth_value, stride_values, factor, nexts = arguments[:7]
        element = context.get_value_type(stored_type)
        total_at = builder.inttoptr(total_address, _FLOAT.as_pointer())
        left_at = builder.inttoptr(left_address, _FLOAT.as_pointer())
        right_at = builder.inttoptr(right_address, element.as_pointer())
        total_stride, left_stride, right_stride = cgutils.unpack_tuple(builder, stride_values)
        coming_addresses = cgutils.unpack_tuple(builder, nexts)

        def row_pointer(base: Any, stride: Any, row: int) -> Any:
            return builder.gep(base, [builder.mul(stride, ir.Constant(_INT64, row))])

        totals = [
            builder.bitcast(row_pointer(total_at, total_stride, row), vector.as_pointer())
            for row in range(num_rows)
        ]
        lefts = [row_pointer(left_at, left_stride, row) for row in range(num_rows)]
        before = builder.block
        loop, after = builder.append_basic_block("product"), builder.append_basic_block("sums")
        starts = [builder.load(each, align=4) for each in totals]
        factors = splat(builder, factor, columns)
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INT64)
        sums = [builder.phi(vector) for _ in range(num_rows)]
        for address in coming_addresses:
            for line in range(0, step_bytes, CACHE_LINE):
                offset = builder.add(
                    builder.mul(k, ir.Constant(_INT64, step_bytes)), ir.Constant(_INT64, line)
                )
                emit_prefetch(builder, builder.add(address, offset))
        right_row = builder.gep(right_at, [builder.mul(k, right_stride)])
        right_vector = builder.bitcast(right_row, ir.VectorType(element, columns).as_pointer())
        right_values = widened_vector(builder, stored_type, builder.load(right_vector, align=1))
        if stored_type in _SCALED:
            right_values = builder.fmul(right_values, factors)
        results = []
        for row in range(num_rows):
            scalar = builder.load(builder.gep(lefts[row], [k]), align=4)
            results.append(fused(builder, splat(builder, scalar, columns), right_values, sums[row]))
        next_k = builder.add(k, ir.Constant(_INT64, 1))
        builder.cbranch(builder.icmp_signed("<", next_k, depth_value), loop, after)
        k.add_incoming(ir.Constant(_INT64, 0), before)
        k.add_incoming(next_k, loop)
        for row in range(num_rows):
            sums[row].add_incoming(starts[row], before)
            sums[row].add_incoming(results[row], loop)
        builder.position_at_end(after)
        for row in range(num_rows):
            builder.store(results[row], totals[row], align=4)
        return context.get_dummy_value()

    addresses = (types.int64,) * 3
    signature = types.none(*addresses, types.int64, strides, types.float32, coming, rows, width, stored, step)
    return signature, codegen
