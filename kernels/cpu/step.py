"""A whole step of a transformer as one program, which all threads run together.

Calling a model's modules costs more time than a small model computes. Here each thread enters the program
once per step. It takes work from counters that the threads share, and waits at a barrier between phases.

A layer without an output layer has its attention elsewhere, and one without a gate its MLP. The program then
ends with the inputs of this part in ``normed``, and goes on behind it when it is called again, with the
outputs in ``update``. An expert of all tokens leaves its outputs there for the module of the other experts.

All values between operations are float32, rounded to the model's dtype where the modules would store them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, from_dtype, types  # type: ignore[attr-defined]

from quire.kernels.cpu.blocks import quantize_vector
from quire.kernels.cpu.exchange import EXCHANGE, add_slots, come, meet, piece_size, slot
from quire.kernels.cpu.intrinsics import (
    TILE_COLUMNS,
    call,
    call_for_int,
    encode,
    exact,
    fetch_and_increment,
    keep_apart,
    pointer,
    widen,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.bfloat16_product import encode_pairs
from quire.kernels.cpu.products.group_product import encode_groups
from quire.kernels.cpu.products.integer_product import encode_integers
from quire.kernels.cpu.products.linear import ROWS, UNIT, UnitCall
from quire.kernels.cpu.products.low_rank import LINEARS, add_updates, project
from quire.kernels.cpu.products.packed_product import (
    BY_GROUP,
    BY_ROW,
    FLOATS,
    PAIRED,
    input_form,
    panel_bytes,
    read_weight,
    row_bytes,
)
from quire.kernels.cpu.rows import Activation, activate, narrow
from quire.kernels.cpu.step_latents import absorb, expand
from quire.kernels.cpu.step_parts import (
    compute_unit,
    copy,
    narrow_rows,
    normalize_row,
    operands,
    rotate,
    wait,
)
from quire.kernels.cpu.step_records import COUNTERS_PER_LAYER, LAYER, STEP
from quire.kernels.cpu.step_states import advance_states

_NUM_LINEARS, _OUTPUT, _GATE, _DOWN = len(LINEARS), *map(LINEARS.index, ("output", "gate", "down"))
_NOT_ADAPTED, _SIGMOID = -1, int(Activation.SIGMOID)


@exact
def _embed(args: Any, first: int, end: int, storage: Any, item_bytes: int, stored: Any) -> None:
    keep_apart()
    size = args.hidden_size
    token_ids = carray(pointer(args.token_ids, np.int64), (args.num_tokens,))
    positions = carray(pointer(args.positions, np.int64), (args.num_tokens,))
    for token in range(first, end):
        x = carray(pointer(args.hidden + 4 * token * size, np.float32), (size,))
        token_id = token_ids[token]
        if args.is_embedding_packed:
            panel_at = args.embedding + panel_bytes(size, stored) * (token_id // TILE_COLUMNS)
            for i in range(size):
                x[i] = narrow(read_weight(panel_at, i, token_id % TILE_COLUMNS, size, stored), storage)
        else:
            vector = carray(pointer(args.embedding + item_bytes * token_id * size, storage), (size,))
            for i in range(size):
                x[i] = widen(vector[i])
        if args.embedding_scale != 1.0:
            for i in range(size):
                x[i] = narrow(x[i] * np.float32(args.embedding_scale), storage)
        if args.position_embedding:
            row = positions[token] + args.position_offset
            added = carray(pointer(args.position_embedding + item_bytes * row * size, storage), (size,))
            for i in range(size):
                x[i] = narrow(x[i] + widen(added[i]), storage)


@exact
def _encode_rows(args: Any, rows: int, length: int, first: int, end: int, stored: Any) -> None:
    """Write some float32 rows in the form in which products read them, unless that is float32."""
    source, target = rows + 4 * first * length, args.operands + first * row_bytes(length, stored)
    if input_form(stored) == PAIRED:
        encode_pairs(source, target, (end - first) * length)
    elif input_form(stored) == BY_GROUP:
        encode_groups(source, target, (end - first) * length)
    elif input_form(stored) == BY_ROW:
        for row in range(end - first):
            encode_integers(source + 4 * row * length, target + row * row_bytes(length, stored), length)


@exact
def _normalize_rows(norm: Any, args: Any, first: int, end: int, storage: Any, stored: Any) -> None:
    keep_apart()
    size = args.hidden_size
    for row in range(first, end):
        at = 4 * row * size
        normalize_row(norm, args.hidden + at, args.normed + at, size, storage)
        if norm.residual_scale != 0.0:
            x = carray(pointer(args.hidden + at, np.float32), (size,))
            normed = carray(pointer(args.normed + at, np.float32), (size,))
            for i in range(size):
                x[i] = narrow(normed[i] * np.float32(norm.residual_scale), storage)
    _encode_rows(args, args.normed, size, first, end, stored)


@exact
def _add_update(
    args: Any, scale: float, after_norm: Any, next_norm: Any, first: int, end: int, storage: Any, stored: Any
) -> None:
    """Add a layer's output with a factor to the residual stream, and normalize the sum for the next layer."""
    keep_apart()
    size, stride = args.hidden_size, args.update_stride
    for row in range(first, end):
        update_at = args.update + 4 * row * stride
        if after_norm.kind != 0:
            normalize_row(after_norm, update_at, update_at, size, storage)
        x = carray(pointer(args.hidden + 4 * row * size, np.float32), (size,))
        update = carray(pointer(update_at, np.float32), (size,))
        if scale != 1.0:
            for i in range(size):
                update[i] = narrow(update[i] * np.float32(scale), storage)
        for i in range(size):
            x[i] = narrow(x[i] + update[i], storage)
    if next_norm.kind != 0:
        _normalize_rows(next_norm, args, first, end, storage, stored)


@exact
def _run_linear(
    one: Any,
    two: Any,
    three: Any,
    adapted: Any,
    first_linear: int,
    counter: int,
    inputs: int,
    input_stride: int,
    output: int,
    output_stride: int,
    num_rows: int,
    storage: Any,
    item_bytes: int,
) -> None:
    """Compute up to three linear layers of the same inputs; their outputs lie side by side.

    ``first_linear`` is the index of their first update of low rank, or ``_NOT_ADAPTED``.
    """
    keep_apart()
    num_units = one.num_units + two.num_units + three.num_units
    while True:
        program = np.int64(fetch_and_increment(counter))
        if program >= num_units * -(-num_rows // ROWS):
            break
        unit, first = program % num_units, program // num_units * ROWS
        linear, own_unit, slot = one, unit, 0
        if unit >= one.num_units:
            linear, own_unit, slot = two, unit - one.num_units, 1
            if own_unit >= two.num_units:
                linear, own_unit, slot = three, own_unit - two.num_units, 2
        outputs = output + 4 * (first * output_stride + unit * UNIT)
        count = min(ROWS, num_rows - first)
        compute_unit(
            linear,
            own_unit,
            inputs + first * input_stride,
            input_stride,
            outputs,
            output_stride,
            count,
            storage,
            item_bytes,
        )
        if adapted.num_rows != 0 and first_linear != _NOT_ADAPTED:
            index, rows = first_linear + slot, (first, count)
            add_updates(adapted, index, slot, rows, own_unit, outputs, output_stride, storage)


@exact
def _add_linear(
    args: Any,
    linear: Any,
    first_linear: int,
    borders_at: int,
    bias: int,
    counter: int,
    inputs: int,
    input_stride: int,
    thread: int,
    num_threads: int,
    phase: int,
    round_number: int,
    storage: Any,
    item_bytes: int,
) -> tuple[int, int]:
    """Compute the output of a linear layer that is added to the residual stream; sum it over the processes.

    Return the next phase, and the round that this process has reached.
    """
    keep_apart()
    if borders_at == 0:
        _run_linear(
            linear,
            args.no_linear,
            args.no_linear,
            args.adapted,
            first_linear,
            counter,
            inputs,
            input_stride,
            args.update,
            args.update_stride,
            args.num_tokens,
            storage,
            item_bytes,
        )
        return wait(args, num_threads, phase), round_number
    exchange = carray(pointer(args.exchange, EXCHANGE), 1)[0]
    round_number += 1
    _sum_pieces(args, exchange, linear, borders_at, counter, inputs, input_stride, round_number)
    phase = wait(args, num_threads, phase)
    if thread == 0:
        come(exchange)
    meet(exchange, round_number)
    first = args.num_tokens * thread // num_threads
    end = args.num_tokens * (thread + 1) // num_threads
    add_slots(exchange, round_number, borders_at, first, end, args.update_stride, args.update)
    _finish_sums(args.update, args.update_stride, bias, first, end, storage)
    if args.adapted.num_rows != 0:
        rows, stride = (first, end - first), args.update_stride
        for unit in range(linear.num_units):
            output = args.update + 4 * (first * stride + unit * UNIT)
            add_updates(args.adapted, first_linear, 0, rows, unit, output, stride, storage)
    return phase, round_number


@exact
def _sum_pieces(
    args: Any,
    exchange: Any,
    linear: Any,
    borders_at: int,
    counter: int,
    inputs: int,
    input_stride: int,
    round_number: int,
) -> None:
    """Compute this process's partial sums of a linear layer, one for each of its pieces.

    They are rounded only after all processes' sums have been added.
    """
    keep_apart()
    borders = carray(pointer(borders_at, np.int64), (exchange.num_ranks + 1,))
    own_first, end = borders[exchange.rank], borders[exchange.rank + 1]
    depth = linear.in_features // (end - own_first)
    num_programs = linear.num_units * -(-args.num_tokens // ROWS)
    first, first_program = own_first, 0
    output = slot(exchange, round_number, exchange.rank)
    program = np.int64(fetch_and_increment(counter))
    while first < end:
        size = piece_size(first, end)
        while program < first_program + num_programs:
            unit = (program - first_program) % linear.num_units
            row = (program - first_program) // linear.num_units * ROWS
            unit_call = UnitCall(
                inputs + row * input_stride,
                input_stride,
                linear.weight,
                linear.in_features,
                unit,
                (first - own_first) * depth,
                size * depth,
                output + 4 * (row * args.update_stride + unit * UNIT),
                args.update_stride,
                min(ROWS, args.num_tokens - row),
                size,
                0,
            )
            call(linear.multiply, unit_call)
            program = np.int64(fetch_and_increment(counter))
        first += size
        first_program += num_programs
        output += exchange.piece_bytes


@exact
def _finish_sums(output: int, width: int, bias: int, first: int, end: int, storage: Any) -> None:
    """Add the bias, unless its address is 0, to some rows, and round them to the model's dtype."""
    sums = carray(pointer(output, np.float32), (end, width))
    if bias != 0:
        addends = carray(pointer(bias, np.float32), (width,))
        for row in range(first, end):
            for column in range(width):
                sums[row, column] += addends[column]
    for row in range(first, end):
        for column in range(width):
            sums[row, column] = narrow(sums[row, column], storage)


@exact
def _run_gate(
    args: Any, layer: Any, first_linear: int, counter: int, storage: Any, item_bytes: int, stored: Any
) -> None:
    """Compute the first half of the MLP: ``activation(gate) * up``, or ``activation(gate)`` without up."""
    keep_apart()
    gates = np.empty((ROWS, UNIT), np.float32)
    stride, input_stride = args.mlp_stride, row_bytes(args.hidden_size, stored)
    while True:
        program = np.int64(fetch_and_increment(counter))
        if program >= layer.gate.num_units * -(-args.num_tokens // ROWS):
            break
        unit, first = program % layer.gate.num_units, program // layer.gate.num_units * ROWS
        num_rows = min(ROWS, args.num_tokens - first)
        inputs = operands(args, args.normed, stored) + first * input_stride
        gates_at = np.int64(gates.ctypes.data)
        compute_unit(layer.gate, unit, inputs, input_stride, gates_at, UNIT, num_rows, storage, item_bytes)
        adapted, rows = args.adapted, (first, num_rows)
        if adapted.num_rows != 0:
            add_updates(adapted, first_linear, 0, rows, unit, gates_at, UNIT, storage)
        activate(layer.activation, gates_at, num_rows * UNIT, storage)
        output = args.mlp + 4 * (first * stride + unit * UNIT)
        outputs = carray(pointer(output, np.float32), (num_rows, stride))
        if layer.up.num_units:
            compute_unit(layer.up, unit, inputs, input_stride, output, stride, num_rows, storage, item_bytes)
            if adapted.num_rows != 0:
                add_updates(adapted, first_linear + 1, 1, rows, unit, output, stride, storage)
            for row in range(num_rows):
                for column in range(UNIT):
                    outputs[row, column] = narrow(gates[row, column] * outputs[row, column], storage)
        else:
            for row in range(num_rows):
                for column in range(UNIT):
                    outputs[row, column] = gates[row, column]


@exact
def _place_tokens(args: Any, layer: Any, first: int, end: int, storage: Any, item_bytes: int) -> None:
    """Rotate queries and keys; write keys and values into their blocks unless these have 8 bits."""
    keep_apart()
    positions = carray(pointer(args.positions, np.int64), (args.num_tokens,))
    slots = carray(pointer(layer.slots, np.int64), (args.num_tokens,))
    dim = args.head_dim
    for token in range(first, end):
        row = args.qkv + 4 * token * args.qkv_stride
        queries = args.queries + 4 * token * args.num_heads * dim
        for head in range(args.num_heads):
            query_at, output = row + 4 * head * layer.query_stride, queries + 4 * head * dim
            if layer.query_scale != 1.0:
                query = carray(pointer(query_at, np.float32), (dim,))
                for d in range(dim):
                    query[d] = narrow(query[d] * np.float32(layer.query_scale), storage)
            rotate(args, layer, query_at, output, dim, positions[token], layer.query_norm, storage)
        for head in range(args.num_kv_heads):
            at = row + 4 * (args.key_column + head * dim)
            rotate(args, layer, at, at, dim, positions[token], layer.key_norm, storage)
        if args.kv_format != 0 or slots[token] < 0:
            continue
        block, offset = slots[token] // args.block_size, slots[token] % args.block_size
        for head in range(args.num_kv_heads):
            key_at = layer.kv + item_bytes * (
                block * args.block_stride + head * args.head_stride + offset * dim
            )
            value_at = key_at + item_bytes * args.value_offset
            stored_key = carray(pointer(key_at, storage), (dim,))
            stored_value = carray(pointer(value_at, storage), (dim,))
            key = carray(pointer(row + 4 * (args.key_column + head * dim), np.float32), (dim,))
            value = carray(pointer(row + 4 * (args.value_column + head * dim), np.float32), (dim,))
            for d in range(dim):
                stored_key[d] = encode(key[d], storage)
                stored_value[d] = encode(value[d], storage)


@exact
def _quantize_tokens(args: Any, layer: Any, thread: int, num_threads: int) -> None:
    """Write keys and values into 8-bit blocks: a thread writes all tokens of a head, in order.

    With latent attention, the latents and the rotated keys have the places of keys and values.
    """
    keep_apart()
    slots = carray(pointer(layer.slots, np.int64), (args.num_tokens,))
    for part in range(thread, 2 * args.num_kv_heads, num_threads):
        is_value, head = part // args.num_kv_heads, part % args.num_kv_heads
        dim = args.head_dim
        if layer.latent_dim:
            dim = dim - layer.latent_dim if is_value else layer.latent_dim
        column = (args.value_column if is_value else args.key_column) + head * dim
        for token in range(args.num_tokens):
            if slots[token] < 0:
                continue
            block, offset = slots[token] // args.block_size, slots[token] % args.block_size
            stored = layer.kv + (
                block * args.block_stride
                + is_value * args.value_offset
                + head * args.head_stride
                + offset * args.head_dim
            )
            scale = layer.kv_scales + 4 * (
                block * args.scale_block_stride + is_value * args.scale_value_offset + head
            )
            quantize_vector(
                carray(pointer(args.qkv + 4 * (token * args.qkv_stride + column), np.float32), (dim,)),
                carray(pointer(stored, np.uint8), (dim,)),
                carray(pointer(scale, np.float32), (1,)),
                offset,
                np.float32(args.scale_per_magnitude),
                args.kv_format == 1,
            )


@exact
def _compute_logits(
    args: Any, thread: int, num_threads: int, phase: int, storage: Any, item_bytes: int, stored: Any
) -> None:
    """Compute the logits after each token."""
    keep_apart()
    size = args.hidden_size
    for row in range(thread, args.num_tokens, num_threads):
        row_at, output_at = args.hidden + 4 * row * size, args.normed + 4 * row * size
        if args.final_norm.kind != 0:
            normalize_row(args.final_norm, row_at, output_at, size, storage)
        else:
            copy(row_at, output_at, size)
        _encode_rows(args, args.normed, size, row, row + 1, stored)
    wait(args, num_threads, phase)
    _run_linear(
        args.head,
        args.no_linear,
        args.no_linear,
        args.adapted,
        _NOT_ADAPTED,
        args.counters + 8 * COUNTERS_PER_LAYER * args.num_layers,
        operands(args, args.normed, stored),
        row_bytes(size, stored),
        args.logits,
        args.logits_stride,
        args.num_logits,
        storage,
        item_bytes,
    )


@exact
def _keep_rows(args: Any, kept: Any, attended_size: int, first: int, end: int) -> None:
    """Copy the rows of the tokens that later phases compute."""
    keep_apart()
    rows = carray(pointer(kept.kept_rows, np.int64), (kept.num_tokens,))
    size = args.hidden_size
    for index in range(first, end):
        row = rows[index]
        copy(args.hidden + 4 * row * size, kept.hidden + 4 * index * size, size)
        copy(
            args.attended + 4 * row * attended_size, kept.attended + 4 * index * attended_size, attended_size
        )


@exact
def _attend(
    args: Any,
    layer: Any,
    counters: int,
    thread: int,
    num_threads: int,
    phase: int,
    storage: Any,
    item_bytes: int,
) -> int:
    """Write the step's keys and values, and attend over all blocks; return the next phase."""
    keep_apart()
    first = args.num_tokens * thread // num_threads
    end = args.num_tokens * (thread + 1) // num_threads
    if layer.latent_dim:
        phase = absorb(args, layer, counters, thread, num_threads, phase, storage, item_bytes)
    else:
        _place_tokens(args, layer, first, end, storage, item_bytes)
    phase = wait(args, num_threads, phase)
    if args.kv_format != 0:
        _quantize_tokens(args, layer, thread, num_threads)
        phase = wait(args, num_threads, phase)
    call(args.attend, (layer.attention,))
    phase = wait(args, num_threads, phase)
    if layer.latent_dim:
        phase = expand(args, layer, counters, thread, num_threads, phase, storage, item_bytes)
    elif layer.query_stride > args.head_dim:
        _gate_rows(args, layer, first, end, storage)
        phase = wait(args, num_threads, phase)
    return phase


@exact
def _gate_rows(args: Any, layer: Any, first: int, end: int, storage: Any) -> None:
    """Multiply each head's result by the sigmoid of its gate."""
    keep_apart()
    dim = args.head_dim
    for head in range(first * args.num_heads, end * args.num_heads):
        token, number = head // args.num_heads, head % args.num_heads
        gates_at = args.qkv + 4 * (token * args.qkv_stride + number * layer.query_stride + dim)
        activate(_SIGMOID, gates_at, dim, storage)
        gates = carray(pointer(gates_at, np.float32), (dim,))
        results = carray(pointer(args.attended + 4 * head * dim, np.float32), (dim,))
        for d in range(dim):
            results[d] = narrow(narrow(results[d], storage) * gates[d], storage)


@exact
def _project(
    args: Any,
    first_linear: int,
    num_linears: int,
    inputs: int,
    stride: int,
    thread: int,
    num_threads: int,
    phase: int,
    storage: Any,
) -> int:
    """Compute what the updates of low rank of some linear layers add up; return the next phase."""
    if args.adapted.num_rows == 0:
        return phase
    project(args.adapted, first_linear, num_linears, inputs, stride, (thread, num_threads), storage)
    return wait(args, num_threads, phase)  # type: ignore[no-any-return]


@exact
def _project_added(
    args: Any,
    linear: Any,
    first_linear: int,
    borders_at: int,
    inputs: int,
    stride: int,
    thread: int,
    num_threads: int,
    phase: int,
    round_number: int,
    storage: Any,
) -> tuple[int, int]:
    """Call ``_project`` for a linear layer that ``_add_linear`` computes; gather inputs that are divided."""
    if borders_at == 0 or args.adapted.max_rank == 0:
        phase = _project(args, first_linear, 1, inputs, stride, thread, num_threads, phase, storage)
        return phase, round_number
    exchange = carray(pointer(args.exchange, EXCHANGE), 1)[0]
    round_number += 1
    borders = carray(pointer(borders_at, np.int64), (exchange.num_ranks + 1,))
    depth = linear.in_features // (borders[exchange.rank + 1] - borders[exchange.rank])
    length, own_column = depth * borders[exchange.num_ranks], depth * borders[exchange.rank]
    # The slots of all processes together have a row of inputs for each row of the step.
    gathered = slot(exchange, round_number, 0)
    rows, num_rows = carray(pointer(args.adapted.rows, np.int64), (args.num_tokens,)), args.adapted.num_rows
    for index in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
        row = rows[index]
        target = gathered + 4 * (row * length + own_column)
        copy(inputs + 4 * row * stride, target, linear.in_features)
    phase = wait(args, num_threads, phase)
    if thread == 0:
        come(exchange)
    meet(exchange, round_number)
    phase = _project(args, first_linear, 1, gathered, length, thread, num_threads, phase, storage)
    return phase, round_number


@exact
def _run_attention(
    args: Any,
    kept: Any,
    layer: Any,
    index: int,
    thread: int,
    num_threads: int,
    phase: int,
    round_number: int,
    storage: Any,
    item_bytes: int,
    stored: Any,
) -> tuple[int, int]:
    """Compute the attention of a layer, for the ``kept`` tokens; see ``_add_linear``."""
    keep_apart()
    size, attended_size = args.hidden_size, layer.output.in_features
    counters = args.counters + 8 * COUNTERS_PER_LAYER * index
    linears = _NUM_LINEARS * index
    if layer.states != 0:
        phase = advance_states(args, layer, counters, thread, num_threads, phase, storage, item_bytes, stored)
    else:
        phase = _project(args, linears, _OUTPUT, args.normed, size, thread, num_threads, phase, storage)
        _run_linear(
            layer.query,
            layer.key,
            layer.value,
            args.adapted,
            linears,
            counters,
            operands(args, args.normed, stored),
            row_bytes(size, stored),
            args.qkv,
            args.qkv_stride,
            args.num_tokens,
            storage,
            item_bytes,
        )
        phase = wait(args, num_threads, phase)
        phase = _attend(args, layer, counters, thread, num_threads, phase, storage, item_bytes)
    first, end = kept.num_tokens * thread // num_threads, kept.num_tokens * (thread + 1) // num_threads
    drops_rows = kept.hidden != args.hidden
    if drops_rows:
        _keep_rows(args, kept, attended_size, first, end)
    if item_bytes < 4:
        narrow_rows(kept.attended, attended_size, first, end, storage)
    _encode_rows(kept, kept.attended, attended_size, first, end, stored)
    if item_bytes < 4 or drops_rows or input_form(stored) != FLOATS:
        phase = wait(args, num_threads, phase)
    at = linears + _OUTPUT
    phase, round_number = _project_added(
        kept,
        layer.output,
        at,
        layer.output_borders,
        kept.attended,
        attended_size,
        thread,
        num_threads,
        phase,
        round_number,
        storage,
    )
    phase, round_number = _add_linear(
        kept,
        layer.output,
        at,
        layer.output_borders,
        layer.output_bias,
        counters + 8,
        operands(kept, kept.attended, stored),
        row_bytes(attended_size, stored),
        thread,
        num_threads,
        phase,
        round_number,
        storage,
        item_bytes,
    )
    scale = layer.attention_scale
    _add_update(kept, scale, layer.after_attention_norm, layer.mlp_norm, first, end, storage, stored)
    return phase, round_number


@exact
def _run_mlp(
    args: Any,
    layer: Any,
    index: int,
    thread: int,
    num_threads: int,
    phase: int,
    round_number: int,
    storage: Any,
    item_bytes: int,
    stored: Any,
) -> tuple[int, int]:
    """Compute the MLP of a layer up to its result in ``update``; see ``_add_linear``."""
    keep_apart()
    counters = args.counters + 8 * COUNTERS_PER_LAYER * index
    at = _NUM_LINEARS * index + _GATE
    size, length = args.hidden_size, args.mlp_stride
    phase = _project(args, at, _DOWN - _GATE, args.normed, size, thread, num_threads, phase, storage)
    _run_gate(args, layer, at, counters + 16, storage, item_bytes, stored)
    phase = wait(args, num_threads, phase)
    if input_form(stored) != FLOATS:
        first, end = args.num_tokens * thread // num_threads, args.num_tokens * (thread + 1) // num_threads
        _encode_rows(args, args.mlp, length, first, end, stored)
        phase = wait(args, num_threads, phase)
    at = _NUM_LINEARS * index + _DOWN
    phase, round_number = _project_added(
        args,
        layer.down,
        at,
        layer.down_borders,
        args.mlp,
        length,
        thread,
        num_threads,
        phase,
        round_number,
        storage,
    )
    phase, round_number = _add_linear(
        args,
        layer.down,
        at,
        layer.down_borders,
        layer.down_bias,
        counters + 24,
        operands(args, args.mlp, stored),
        row_bytes(length, stored),
        thread,
        num_threads,
        phase,
        round_number,
        storage,
        item_bytes,
    )
    return phase, round_number


@exact
def _begin(
    args: Any, layers: Any, first: int, end: int, storage: Any, item_bytes: int, stored: Any, head_stored: Any
) -> None:
    """Write the inputs of the first part to compute in ``normed``."""
    keep_apart()
    at = args.first_layer
    if args.begins_with_mlp:
        layer, scale = layers[at], layers[at].attention_scale
        _add_update(args, scale, layer.after_attention_norm, layer.mlp_norm, first, end, storage, stored)
    elif at == 0:
        _embed(args, first, end, storage, item_bytes, head_stored)
        _normalize_rows(layers[0].attention_norm, args, first, end, storage, stored)
    else:
        next_norm = args.no_norm if at == args.num_layers else layers[at].attention_norm
        layer, scale = layers[at - 1], layers[at - 1].mlp_scale
        _add_update(args, scale, layer.after_mlp_norm, next_norm, first, end, storage, stored)


@exact
def _run_step(args: Any, kept: Any, storage: Any, item_bytes: int, stored: Any, head_stored: Any) -> None:
    num_threads = call_for_int(args.team_size) if args.team_size else np.int64(1)
    thread = np.int64(fetch_and_increment(args.next_thread))
    first_layer, num_layers = args.first_layer, args.num_layers
    begins_with_mlp = args.begins_with_mlp
    if first_layer + begins_with_mlp == num_layers:
        args = kept
    first = args.num_tokens * thread // num_threads
    end = args.num_tokens * (thread + 1) // num_threads
    layers = carray(pointer(args.layers, LAYER), (num_layers,))
    _begin(args, layers, first, end, storage, item_bytes, stored, head_stored)
    phase = np.int64(0)
    round_number = np.int64(args.last_round)
    for index in range(first_layer, num_layers):
        layer = layers[index]
        is_last = index == num_layers - 1
        if index > first_layer or begins_with_mlp == 0:
            if layer.output.num_units == 0:
                return
            phase = wait(args, num_threads, phase)
            those = kept if is_last else args
            phase, round_number = _run_attention(
                args,
                those,
                layer,
                index,
                thread,
                num_threads,
                phase,
                round_number,
                storage,
                item_bytes,
                stored,
            )
            if is_last:
                args = kept
                first = args.num_tokens * thread // num_threads
                end = args.num_tokens * (thread + 1) // num_threads
        if layer.gate.num_units == 0:
            return
        phase = wait(args, num_threads, phase)
        phase, round_number = _run_mlp(
            args, layer, index, thread, num_threads, phase, round_number, storage, item_bytes, stored
        )
        if layer.has_experts:
            return
        next_norm = args.no_norm if is_last else layers[index + 1].attention_norm
        _add_update(args, layer.mlp_scale, layer.after_mlp_norm, next_norm, first, end, storage, stored)
    phase = wait(args, num_threads, phase)
    _compute_logits(args, thread, num_threads, phase, storage, item_bytes, head_stored)


@cache
def program(storage: Any, stored: Any, head_stored: Any) -> Any:
    """Compile the function ``void step(STEP[2])`` that each thread runs.

    Args:
        storage: the NumPy type of the model's dtype.
        stored: a NumPy type of weights whose inputs have the form of the inputs of all its linear layers.
        head_stored: such a type for the output layer; that of its weights if the embedding is tied to it.
    """
    item_bytes = np.dtype(storage).itemsize

    def step(arguments: Any) -> None:
        both = carray(arguments, 2)
        _run_step(both[0], both[1], storage, item_bytes, stored, head_stored)

    signature = types.void(types.CPointer(from_dtype(STEP)))
    return compile_kernel(signature, step, error_model="numpy")
