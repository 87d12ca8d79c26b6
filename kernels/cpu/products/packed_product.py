"""Products of rows with packed weights, in LLVM IR; weights may be integers of 8 or 4 bits with scales.

A panel has ``TILE_COLUMNS`` output columns. Unquantized, it is ``[in_features, TILE_COLUMNS]``. Quantized, it
is a run of groups of ``GROUP`` inputs. A group has words of 32 bits, ``[inputs / inputs in a word,
TILE_COLUMNS]``, and then a bfloat16 scale for each column. The first input of a word is in its lowest bits.
Of eight inputs, the first four are in the lower halves of the word's bytes. ``group_product`` has the groups
of weights whose inputs are quantized, too.

An integer is converted to float32 while it is in the upper bits of its word, which saves a shift. The result
is 2**24 times the value of an 8-bit integer and 2**28 times that of a 4-bit integer. The scales are smaller
by this factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import (
    CACHE_LINE,
    GROUP,
    TILE_COLUMNS,
    emit_loop,
    emit_prefetch,
    exact,
    fused,
    instruction,
    is_zen,
    splat,
    widened_vector,
)
from quire.kernels.cpu.products.amx_product import TILE_BYTES, TILE_INPUTS, TILE_SIDE
from quire.kernels.cpu.products.bfloat16_product import LANES, emit_pair_products
from quire.kernels.cpu.products.coded_product import (
    CODINGS,
    Coding,
    emit_groups,
    float_lanes,
    place_in_word,
)
from quire.kernels.cpu.products.group_product import (
    GROUP_CODINGS,
    OPERAND_BYTES,
    SCALE_WORD,
    SUM_WORD,
    GroupCoding,
    emit_code_products,
    emit_end,
    emit_nibbles,
    emit_start,
    emit_upper_bits,
)
from quire.kernels.cpu.products.integer_product import (
    INPUT_BYTES,
    INPUTS,
    INTEGER_INSTRUCTION,
    INTEGER_LANES,
    emit_integer_products,
)
from quire.kernels.cpu.products.stored_types import (
    BITS,
    CHAIN_TYPE,
    HALVES,
    INTEGER_TILE_TYPE,
    INTEGER_TYPE,
    PAIR_TYPE,
    SCALE_BYTES,
    TILE_TYPE,
    group_bytes,
)

FEW_ROWS = 2
"""For up to this many rows, the sums of one panel would leave most registers unused."""
MOST_TILE_ROWS = 6
"""Most rows whose sums fit into registers."""
AHEAD = 64
"""Distance, in inputs of a panel, at which a tile of several rows prefetches its own weights."""
_GROUPS_AHEAD = 8
"""Distance, in groups, at which it prefetches quantized weights."""
_BYTES_AHEAD = 4096 if TILE_COLUMNS == 64 else 0
"""Distance at which a few rows prefetch weights; 0 for none, since with AVX2 they are faster without."""
_IS_ZEN = is_zen()
"""Whether a few rows prefetch weights of all types, only into the L1 cache.

The larger caches keep what the rest of a step needs. On other processors, only groups and numbers of 16 bits
are prefetched, into all caches: words of integers are faster without.
"""

_FLOAT_LANES = 16 if TILE_COLUMNS == 64 else 8
"""Floats of a register."""
_MOST_SUMS = 24 if TILE_COLUMNS == 64 else 12
"""Vectors of sums that fit into registers beside other values."""

_BYTE = ir.IntType(8)
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_FLOAT = ir.FloatType()

_Sums = dict[tuple[int, int], Any]


@instruction
def widen_panel(typingctx: Any, panel: Any, depth: Any, target: Any, stored: Any) -> Any:
    """Write the first weights of a panel, if ``are_halves``, as float32 ``[depth, TILE_COLUMNS]``.

    Args:
        panel, target: addresses.
        depth: number of inputs.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype in HALVES:
            halves, floats = (
                builder.inttoptr(address, ir.VectorType(kind, TILE_COLUMNS).as_pointer())
                for address, kind in ((arguments[0], _INT16), (arguments[2], _FLOAT))
            )

            def write(k: Any, _: _Sums) -> _Sums:
                values = builder.load(builder.gep(halves, [k]), align=2)
                wide = widened_vector(builder, stored.dtype, values)
                builder.store(wide, builder.gep(floats, [k]), align=4)
                return {}

            emit_loop(builder, arguments[1], {}, write)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 3, stored), codegen


class _Tile(NamedTuple):
    """A tile of sums, and the addresses that its product reads.

    Attributes:
        totals: pointers to the vectors of sums, by row and panel.
        lefts: pointers to the bytes of the rows' inputs.
        rights: pointers to the panels' bytes.
        columns: number of columns of a panel.
    """

    builder: Any
    totals: _Sums
    lefts: list[Any]
    rights: list[Any]
    columns: int

    def input(self, row: int, k: Any) -> Any:
        """Emit a vector that repeats a row's input ``k``."""
        return splat(self.builder, self.word(row, k, _FLOAT), self.columns)

    def word(self, row: int, index: Any, kind: Any) -> Any:
        """Emit the load of the word of 32 bits at an index of a row's inputs."""
        words = self.builder.bitcast(self.lefts[row], kind.as_pointer())
        return self.builder.load(self.builder.gep(words, [index]), align=4)

    def stored(self, panel: int, offset: Any, element: Any) -> Any:
        """Emit the load of a vector of stored values of a panel, ``offset`` bytes from its beginning."""
        return self.stored_part(panel, offset, element, self.columns)

    def stored_part(self, part: int, offset: Any, element: Any, lanes: int) -> Any:
        """Emit the load of a part of these values, of which a panel has ``columns / lanes``."""
        panel, place = divmod(part, self.columns // lanes)
        vector = ir.VectorType(element, lanes).as_pointer()
        at = self.builder.bitcast(self.builder.gep(self.rights[panel], [offset]), vector)
        return self.builder.load(self.builder.gep(at, [ir.Constant(_INT64, place)]), align=1)

    def total_parts(self, kind: Any, lanes: int) -> _Sums:
        """Emit pointers to the sums by row and part, of which a panel has ``columns / lanes``."""
        vector, num_parts = ir.VectorType(kind, lanes).as_pointer(), self.columns // lanes
        return {
            (row, panel * num_parts + part): self.builder.gep(
                self.builder.bitcast(total, vector), [ir.Constant(_INT64, part)]
            )
            for (row, panel), total in self.totals.items()
            for part in range(num_parts)
        }

    def prefetch(self, offset: Any, distances: Iterable[int]) -> None:
        """Emit prefetches of the panels, at some distances behind ``offset`` bytes from their beginnings."""
        for distance in distances:
            at = self.builder.add(offset, ir.Constant(_INT64, distance))
            for right in self.rights:
                line = self.builder.ptrtoint(self.builder.gep(right, [at]), _INT64)
                emit_prefetch(self.builder, line, is_read_once=_IS_ZEN and len(self.lefts) <= FEW_ROWS)

    def add_products(self, sums: _Sums, k: Any, weights: list[Any]) -> _Sums:
        """Emit the sums after adding the products of input ``k`` and the panels' weights."""
        results = {}
        for row in range(len(self.lefts)):
            scalars = self.input(row, k)
            for panel, values in enumerate(weights):
                results[row, panel] = fused(self.builder, scalars, values, sums[row, panel])
        return results


@instruction
def add_rows_product(
    typingctx: Any,
    total: Any,
    left: Any,
    right: Any,
    depth: Any,
    fetch: Any,
    strides: Any,
    rows: Any,
    panels: Any,
    stored: Any,
) -> Any:
    """Add the product of some rows with packed weights to ``total``, with all sums in registers.

    ``total[r, p * TILE_COLUMNS + c] += sum over k < depth of left[r, k] * right[p, k, c]``, where each sum
    runs over k in order with fused multiplications. If the weights are quantized, each group has a separate
    sum over its integers, which is then multiplied by the scale and added to the total. In both cases the
    bits do not depend on the size of the tile. If weights are codes, products of more than ``FEW_ROWS`` rows
    read what ``decode`` wrote.

    Args:
        total, left, right: addresses; total is float32, and left has the ``input_form`` of these weights.
        depth: number of products in a sum; whole groups, pairs or tiles, if the weights have these.
        fetch: address to prefetch for k = 0, and the number of bytes from there to the address for the next
            k. Only products of 3 or more rows with float32 weights use this.
        strides: elements from one row of total to the next; bytes from one row of left to the next, and from
            one panel to the next.
        rows, panels: size of the tile, literals.
        stored: the NumPy type of the weights, in ``STORAGE`` or ``QUANTIZED``.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (rows, panels)):
        return None
    num_rows, num_panels = rows.literal_value, panels.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile = _make_tile(builder, arguments, num_rows, num_panels)
        if stored.dtype in GROUP_CODINGS:
            _add_codes(tile, arguments[3], GROUP_CODINGS[stored.dtype])
        elif stored.dtype in BITS:
            _add_groups(tile, arguments[3], BITS[stored.dtype])
        elif stored.dtype == PAIR_TYPE:
            _add_words(tile, arguments[3], (2, 1), (_FLOAT, LANES), emit_pair_products)
        elif stored.dtype == CHAIN_TYPE:
            _add_chains(tile, arguments[3])
        elif stored.dtype == INTEGER_TYPE or (stored.dtype == INTEGER_TILE_TYPE and num_rows <= FEW_ROWS):
            emit = partial(emit_integer_products, instruction=INTEGER_INSTRUCTION)
            _add_words(tile, arguments[3], (INPUTS, INPUT_BYTES), (_INT32, INTEGER_LANES), emit)
        elif stored.dtype in CODINGS and num_rows <= FEW_ROWS:
            _add_coded(tile, arguments[3], CODINGS[stored.dtype])
        elif stored.dtype in CODINGS:
            _add_plain(tile, arguments[3], arguments[4], _FLOAT, types.float32)
        elif stored.dtype not in (TILE_TYPE, INTEGER_TILE_TYPE):  # ``add_tile_products`` multiplies tiles
            element = context.get_value_type(stored.dtype)
            _add_plain(tile, arguments[3], arguments[4], element, stored.dtype)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, fetch, strides, rows, panels, stored), codegen


@exact
def add_tile(
    num_rows: int, total: int, left: int, right: int, count: int, fetch: Any, strides: Any, stored: Any
) -> None:
    """Add the products of 3 to ``MOST_TILE_ROWS`` rows; see ``add_rows_product``."""
    if num_rows == 6:
        add_rows_product(total, left, right, count, fetch, strides, 6, 1, stored)
    elif num_rows == 5:
        add_rows_product(total, left, right, count, fetch, strides, 5, 1, stored)
    elif num_rows == 4:
        add_rows_product(total, left, right, count, fetch, strides, 4, 1, stored)
    else:
        add_rows_product(total, left, right, count, fetch, strides, 3, 1, stored)


def _make_tile(builder: Any, arguments: Any, num_rows: int, num_panels: int) -> _Tile:
    total, left, right = (
        builder.inttoptr(address, kind.as_pointer())
        for address, kind in zip(arguments[:3], (_FLOAT, _BYTE, _BYTE), strict=True)
    )
    total_stride, left_stride, panel_stride = cgutils.unpack_tuple(builder, arguments[5])
    vector = ir.VectorType(_FLOAT, TILE_COLUMNS)

    def moved(base: Any, stride: Any, index: int, offset: int = 0) -> Any:
        distance = builder.mul(stride, ir.Constant(_INT64, index))
        return builder.gep(base, [builder.add(distance, ir.Constant(_INT64, offset))])

    return _Tile(
        builder,
        {
            (row, panel): builder.bitcast(
                moved(total, total_stride, row, panel * TILE_COLUMNS), vector.as_pointer()
            )
            for row in range(num_rows)
            for panel in range(num_panels)
        },
        [moved(left, left_stride, row) for row in range(num_rows)],
        [moved(right, panel_stride, panel) for panel in range(num_panels)],
        TILE_COLUMNS,
    )


def _add_plain(tile: _Tile, depth: Any, fetch: Any, element: Any, stored: Any) -> None:
    """Emit the product with weights that are not quantized."""
    builder, input_bytes = tile.builder, TILE_COLUMNS * stored.bitwidth // 8
    fetch_first, fetch_step = cgutils.unpack_tuple(builder, fetch)

    def add(k: Any, sums: _Sums) -> _Sums:
        offset = builder.mul(k, ir.Constant(_INT64, input_bytes))
        if len(tile.lefts) > 2:
            if stored is types.float32:
                emit_prefetch(builder, builder.add(fetch_first, builder.mul(k, fetch_step)))
            else:
                tile.prefetch(offset, (AHEAD * input_bytes,))
        elif _BYTES_AHEAD and (_IS_ZEN or stored in HALVES):
            tile.prefetch(offset, range(_BYTES_AHEAD, _BYTES_AHEAD + input_bytes, CACHE_LINE))
        weights = [
            widened_vector(builder, stored, tile.stored(panel, offset, element))
            for panel in range(len(tile.rights))
        ]
        return tile.add_products(sums, k, weights)

    starts = {each: builder.load(total, align=4) for each, total in tile.totals.items()}
    for each, result in emit_loop(builder, depth, starts, add).items():
        builder.store(result, tile.totals[each], align=4)


def _add_coded(tile: _Tile, depth: Any, coding: Coding) -> None:
    """Emit the product with weights that are decoded in registers."""
    builder, lanes = tile.builder, float_lanes()
    totals = tile.total_parts(_FLOAT, lanes)

    def add(sums: _Sums, k: Any, weights: list[Any]) -> _Sums:
        results = {}
        for row in range(len(tile.lefts)):
            scalars = splat(builder, tile.word(row, k, _FLOAT), lanes)
            for part, values in enumerate(weights):
                results[row, part] = fused(builder, scalars, values, sums[row, part])
        return results

    starts = {each: builder.load(total, align=4) for each, total in totals.items()}
    for each, result in emit_groups(builder, coding, tile.rights, depth, starts, add).items():
        builder.store(result, totals[each], align=4)


def _add_words(
    tile: _Tile, depth: Any, words: tuple[int, int], sums_type: tuple[Any, int], emit: Callable[..., Any]
) -> None:
    """Emit the product with weights of which each column has words of 32 bits with several inputs.

    Args:
        words: inputs of a word of weights, and how many words of a row have these inputs.
        sums_type: type of the sums, and how many of them an instruction adds to.
        emit: emits the instruction from words of inputs, a vector of words of weights, and the sums.
    """
    builder, (per_word, num_words) = tile.builder, words
    kind, lanes = sums_type
    totals = tile.total_parts(kind, lanes)
    num_parts = len(tile.rights) * tile.columns // lanes
    num_rows, size, num_turns = len(tile.lefts), num_parts, 1
    if num_words == 2 and num_rows > 1:
        # With two vectors for each part's weights, registers have room for the sums of 4 rows and 2 parts.
        size, num_turns = 2, -(-num_rows // 4)

    def add(index: Any, sums: _Sums) -> _Sums:
        offset = builder.mul(index, ir.Constant(_INT64, 4 * tile.columns))
        first = builder.mul(index, ir.Constant(_INT64, num_words))
        if _BYTES_AHEAD and _IS_ZEN and num_rows <= FEW_ROWS:
            tile.prefetch(offset, range(_BYTES_AHEAD, _BYTES_AHEAD + 4 * tile.columns, CACHE_LINE))
        places = [builder.add(first, ir.Constant(_INT64, number)) for number in range(num_words)]
        rows, parts = ({each[axis] for each in sums} for axis in range(2))
        inputs = {row: [tile.word(row, each, _INT32) for each in places] for row in sorted(rows)}
        weights = {part: tile.stored_part(part, offset, _INT32, lanes) for part in sorted(parts)}
        return {
            (row, part): emit(builder, inputs[row], weights[part], total)
            for (row, part), total in sums.items()
        }

    count = builder.udiv(depth, ir.Constant(_INT64, per_word))
    for start in range(0, num_parts, size):
        for turn in range(num_turns):
            rows = range(num_rows * turn // num_turns, num_rows * (turn + 1) // num_turns)
            own = [(row, part) for row in rows for part in range(start, start + size)]
            starts = {each: builder.load(totals[each], align=4) for each in own}
            for each, result in emit_loop(builder, count, starts, add).items():
                builder.store(result, totals[each], align=4)


def _add_chains(tile: _Tile, depth: Any) -> None:
    """Emit the product with weights in tiles: two chains of 16 products each, then their sum.

    Several loops each compute some columns, so that the sums of both chains fit into registers.
    """
    builder, lanes = tile.builder, _FLOAT_LANES
    per_panel, per_tile = TILE_COLUMNS // lanes, TILE_SIDE // lanes
    num_rows, num_vectors = len(tile.lefts), len(tile.rights) * per_panel
    size = min(num_vectors, max(1, _MOST_SUMS // (2 * num_rows)))
    for first in range(0, num_vectors, size):
        pointers = {}
        for vector in range(first, min(first + size, num_vectors)):
            panel, part = divmod(vector, per_panel)
            at = part // per_tile * TILE_BYTES + part % per_tile * 4 * lanes
            pointers[vector] = builder.gep(tile.rights[panel], [ir.Constant(_INT64, at)])
        _add_chains_of(tile, depth, pointers)


def _add_chains_of(tile: _Tile, depth: Any, rights: dict[int, Any]) -> None:
    """Emit the sums of some vectors of columns, whose weights begin at some pointers."""
    builder, lanes, per_panel = tile.builder, _FLOAT_LANES, TILE_COLUMNS // _FLOAT_LANES
    floats, words = ir.VectorType(_FLOAT, lanes), ir.VectorType(_INT32, lanes)
    upper, half = ir.Constant(words, [0xFFFF0000] * lanes), ir.Constant(words, [16] * lanes)
    zero = ir.Constant(floats, [0.0] * lanes)
    keys = [(row, vector) for row in range(len(tile.lefts)) for vector in rights]
    totals = {}
    for row, vector in keys:
        total = builder.bitcast(tile.totals[row, vector // per_panel], floats.as_pointer())
        totals[row, vector] = builder.gep(total, [ir.Constant(_INT64, vector % per_panel)])

    def add_block(block: Any, _: _Sums) -> _Sums:
        start = builder.mul(block, ir.Constant(_INT64, 2 * TILE_INPUTS * TILE_COLUMNS))
        first = builder.mul(block, ir.Constant(_INT64, TILE_INPUTS))

        def add_pair(pair: Any, sums: _Sums) -> _Sums:
            offset = builder.add(start, builder.mul(pair, ir.Constant(_INT64, 4 * TILE_SIDE)))
            weights = {}
            for vector, right in rights.items():
                at = builder.gep(right, [offset])
                if len(tile.lefts) > 2:
                    ahead = builder.gep(at, [ir.Constant(_INT64, AHEAD * 2 * TILE_COLUMNS)])
                    emit_prefetch(builder, builder.ptrtoint(ahead, _INT64))
                both = builder.load(builder.bitcast(at, words.as_pointer()), align=4)
                halves = (builder.and_(both, upper), builder.shl(both, half))
                weights[vector] = [builder.bitcast(each, floats) for each in halves]
            results = {}
            for row in range(len(tile.lefts)):
                k = builder.add(first, builder.shl(pair, ir.Constant(_INT64, 1)))
                for place in range(2):
                    at = builder.add(k, ir.Constant(_INT64, place))
                    scalars = splat(builder, tile.word(row, at, _FLOAT), lanes)
                    for vector, values in weights.items():
                        chain = (2 * row + place, vector)
                        results[chain] = fused(builder, scalars, values[place], sums[chain])
            return results

        zeros = {(2 * row + place, vector): zero for row, vector in keys for place in range(2)}
        chains = emit_loop(builder, ir.Constant(_INT64, TILE_INPUTS // 2), zeros, add_pair)
        for (row, vector), total in totals.items():
            both = builder.fadd(chains[2 * row, vector], chains[2 * row + 1, vector])
            builder.store(builder.fadd(builder.load(total, align=4), both), total, align=4)
        return {}

    emit_loop(builder, builder.udiv(depth, ir.Constant(_INT64, TILE_INPUTS)), {}, add_block)


def _for_each_group(tile: _Tile, depth: Any, num_bytes: int, add: Callable[[Any, Any], None]) -> None:
    """Emit a loop over groups of quantized weights: ``add(group, start)``.

    A group begins ``start`` bytes from the beginning of each panel, and takes ``num_bytes`` there.
    """
    builder = tile.builder

    def add_group(group: Any, _: _Sums) -> _Sums:
        start = builder.mul(group, ir.Constant(_INT64, num_bytes))
        ahead = _GROUPS_AHEAD * num_bytes if len(tile.lefts) > FEW_ROWS else _BYTES_AHEAD
        if ahead:
            tile.prefetch(start, range(ahead, ahead + num_bytes, CACHE_LINE))
        add(group, start)
        return {}

    emit_loop(builder, builder.udiv(depth, ir.Constant(_INT64, GROUP)), {}, add_group)


def _add_codes(tile: _Tile, depth: Any, coding: GroupCoding) -> None:
    """Emit the product of codes in groups and inputs of 8 bits."""
    parts = len(tile.rights) * TILE_COLUMNS // INTEGER_LANES
    # With the weights of two words of inputs, the sums of several rows fit into registers for two parts only.
    size = parts if len(tile.lefts) <= 2 else 2

    def add(group: Any, start: Any) -> None:
        for first in range(0, parts, size):
            _add_codes_of(tile, group, start, range(first, first + size), coding)

    _for_each_group(tile, depth, coding.group_bytes, add)


def _add_codes_of(tile: _Tile, group: Any, start: Any, parts: range, coding: GroupCoding) -> None:
    """Emit the sums of a group for some parts of the columns."""
    builder, rows = tile.builder, range(len(tile.lefts))
    instruction, lanes = INTEGER_INSTRUCTION, INTEGER_LANES
    pointers, floats = tile.total_parts(_FLOAT, lanes), ir.VectorType(_FLOAT, lanes)
    first = builder.mul(group, ir.Constant(_INT64, OPERAND_BYTES // 4))
    keys = [(row, part) for row in rows for part in parts]
    totals: _Sums = {}

    def word(row: int, index: int, kind: Any = _INT32) -> Any:
        return tile.word(row, builder.add(first, ir.Constant(_INT64, index)), kind)

    def of_group(offset: int, element: Any) -> dict[int, Any]:
        at = builder.add(start, ir.Constant(_INT64, offset))
        return {part: tile.stored_part(part, at, element, lanes) for part in parts}

    def factors(index: int) -> dict[int, Any]:
        stored = of_group(coding.code_bytes + 2 * TILE_COLUMNS * index, _INT16)
        return {part: widened_vector(builder, coding.scale_type, each) for part, each in stored.items()}

    def codes(step: int) -> dict[int, list[Any]]:
        """Return the codes of two words of inputs, by part."""
        if coding.bits < 8:
            words = of_group(4 * TILE_COLUMNS * step, _INT32)
            lower = {
                part: [emit_nibbles(builder, each, half) for half in range(2)] for part, each in words.items()
            }
            if coding.bits == 4:
                return lower
            upper = of_group(4 * TILE_COLUMNS * (GROUP // 8 + step // 2), _INT32)
            return {
                part: [
                    builder.or_(each, emit_upper_bits(builder, upper[part], 2 * (step % 2) + half))
                    for half, each in enumerate(nibbles)
                ]
                for part, nibbles in lower.items()
            }
        both = [of_group(4 * TILE_COLUMNS * (2 * step + number), _INT32) for number in range(2)]
        return {part: [each[part] for each in both] for part in parts}

    row_scales = [word(row, SCALE_WORD, _FLOAT) for row in rows]
    halves = [[word(row, SUM_WORD + half) for half in range(2)] for row in rows]
    row_sums = [builder.add(*each) for each in halves]
    steps = range(coding.per_scale // 8)
    num_scales = GROUP // coding.per_scale
    for scale in range(num_scales):
        own = row_sums if num_scales == 1 else [each[scale] for each in halves]
        corrections = [builder.mul(each, ir.Constant(_INT32, -coding.zero)) for each in own]
        how = (coding.most, instruction)
        sums = {key: emit_start(builder, corrections[key[0]], *how, lanes) for key in keys}
        for step in range(scale * len(steps), (scale + 1) * len(steps)):
            weights = codes(step)
            inputs = [[word(row, 2 * step + number) for number in range(2)] for row in rows]
            for row, part in keys:
                products = (inputs[row], weights[part], sums[row, part])
                sums[row, part] = emit_code_products(builder, *products, *how)
        scales = factors(scale)
        for row, part in keys:
            exact_sums = emit_end(builder, sums[row, part], corrections[row], *how, lanes)
            both = builder.fmul(splat(builder, row_scales[row], lanes), scales[part])
            total = totals[row, part] if scale else builder.load(pointers[row, part], align=4)
            totals[row, part] = fused(builder, builder.sitofp(exact_sums, floats), both, total)
    if coding.has_offsets:
        offsets = factors(num_scales)
        for row, part in keys:
            inputs_sum = builder.fmul(builder.sitofp(row_sums[row], _FLOAT), row_scales[row])
            totals[row, part] = fused(
                builder, splat(builder, inputs_sum, lanes), offsets[part], totals[row, part]
            )
    for key, total in totals.items():
        builder.store(total, pointers[key], align=4)


def _add_groups(tile: _Tile, depth: Any, bits: int) -> None:
    """Emit the product with quantized weights."""
    builder, num_bytes = tile.builder, group_bytes(bits)
    zero = ir.Constant(ir.VectorType(_FLOAT, TILE_COLUMNS), [0.0] * TILE_COLUMNS)

    def add(group: Any, start: Any) -> None:
        first = builder.mul(group, ir.Constant(_INT64, GROUP))
        sums = _sum_group(tile, start, first, dict.fromkeys(tile.totals, zero), bits)
        scales_at = builder.add(start, ir.Constant(_INT64, num_bytes - SCALE_BYTES * TILE_COLUMNS))
        for panel in range(len(tile.rights)):
            stored = tile.stored(panel, scales_at, _INT16)
            scales = widened_vector(builder, types.uint16, stored)
            for row in range(len(tile.lefts)):
                total = tile.totals[row, panel]
                added = fused(builder, sums[row, panel], scales, builder.load(total, align=4))
                builder.store(added, total, align=4)

    _for_each_group(tile, depth, num_bytes, add)


def _sum_group(tile: _Tile, start: Any, first: Any, zeros: _Sums, bits: int) -> _Sums:
    """Emit the sums over a group's integers.

    Args:
        start: bytes from the beginning of a panel to the group.
        first: index of the group's first input.
    """
    builder, per_word = tile.builder, 32 // bits

    def add(index: Any, sums: _Sums) -> _Sums:
        offset = builder.add(start, builder.mul(index, ir.Constant(_INT64, 4 * TILE_COLUMNS)))
        words = [tile.stored(panel, offset, _INT32) for panel in range(len(tile.rights))]
        k = builder.add(first, builder.mul(index, ir.Constant(_INT64, per_word)))
        for number in range(per_word):
            weights = [_upper_bits(builder, each, place_in_word(number, bits), bits) for each in words]
            sums = tile.add_products(sums, builder.add(k, ir.Constant(_INT64, number)), weights)
        return sums

    return emit_loop(builder, ir.Constant(_INT64, GROUP // per_word), zeros, add)


def _upper_bits(builder: Any, words: Any, place: int, bits: int) -> Any:
    """Emit the conversion of one integer of each word to float32, times ``2 ** (32 - bits)``."""
    wide = words.type
    if distance := 32 - bits * (place + 1):
        words = builder.shl(words, ir.Constant(wide, [distance] * wide.count))
    if place:
        words = builder.and_(words, ir.Constant(wide, [-1 << 32 - bits] * wide.count))
    return builder.sitofp(words, ir.VectorType(_FLOAT, wide.count))
