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

from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import call_for_int, exact, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.step.attention import run_attention
from quire.kernels.cpu.step.linear_layers import NOT_ADAPTED, compute_linears, encode_rows, operands
from quire.kernels.cpu.step.mlp import run_mlp
from quire.kernels.cpu.step.records import COUNTERS_PER_LAYER, LAYER, STEP
from quire.kernels.cpu.step.residual_stream import add_update, embed, normalize_rows
from quire.kernels.cpu.step.team import Team, share, wait
from quire.kernels.cpu.step.vectors import copy, normalize_row


@exact
def _compute_logits(args: Any, team: Any, storage: Any, stored: Any) -> None:
    """Compute the logits after each token."""
    keep_apart()
    size = args.hidden_size
    first, end = share(args.num_tokens, team)
    for row in range(first, end):
        row_at, output_at = args.hidden + 4 * row * size, args.normed + 4 * row * size
        if args.final_norm.kind != 0:
            normalize_row(args.final_norm, row_at, output_at, size, storage)
        else:
            copy(row_at, output_at, size)
    encode_rows(args, args.normed, size, team, stored)
    wait(args, team)
    linears = (args.head, args.no_linear, args.no_linear)
    inputs, outputs = operands(args, args.normed, size, stored), (args.logits, args.logits_stride)
    counter = args.counters + 8 * COUNTERS_PER_LAYER * args.num_layers
    compute_linears(args, linears, NOT_ADAPTED, counter, inputs, outputs, args.num_logits, storage)


@exact
def _begin(args: Any, layers: Any, team: Any, storage: Any, stored: Any, head_stored: Any) -> None:
    """Write the inputs of the first part to compute in ``normed``."""
    keep_apart()
    at = args.first_layer
    if args.begins_with_mlp:
        layer, scale = layers[at], layers[at].attention_scale
        add_update(args, scale, layer.after_attention_norm, layer.mlp_norm, team, storage, stored)
    elif at == 0:
        embed(args, team, storage, head_stored)
        normalize_rows(args, layers[0].attention_norm, team, storage, stored)
    else:
        next_norm = args.no_norm if at == args.num_layers else layers[at].attention_norm
        layer, scale = layers[at - 1], layers[at - 1].mlp_scale
        add_update(args, scale, layer.after_mlp_norm, next_norm, team, storage, stored)


@exact
def _run_step(args: Any, kept: Any, storage: Any, stored: Any, head_stored: Any) -> None:
    num_threads = call_for_int(args.team_size) if args.team_size else 1
    team = Team(fetch_and_increment(args.next_thread), num_threads)
    first_layer, num_layers = args.first_layer, args.num_layers
    begins_with_mlp = args.begins_with_mlp
    if first_layer + begins_with_mlp == num_layers:
        args = kept
    layers = carray(pointer(args.layers, LAYER), (num_layers,))
    _begin(args, layers, team, storage, stored, head_stored)
    for index in range(first_layer, num_layers):
        layer = layers[index]
        is_last = index == num_layers - 1
        if index > first_layer or begins_with_mlp == 0:
            if layer.output.num_units == 0:
                return
            wait(args, team)
            those = kept if is_last else args
            run_attention(args, those, layer, index, team, storage, stored)
            args = those
        if layer.gate.num_units == 0:
            return
        wait(args, team)
        run_mlp(args, layer, index, team, storage, stored)
        if layer.has_experts:
            return
        next_norm = args.no_norm if is_last else layers[index + 1].attention_norm
        add_update(args, layer.mlp_scale, layer.after_mlp_norm, next_norm, team, storage, stored)
    wait(args, team)
    _compute_logits(args, team, storage, head_stored)


@cache
def program(storage: Any, stored: Any, head_stored: Any) -> Any:
    """Compile the function ``void step(STEP[2])`` that each thread runs.

    Args:
        storage: the NumPy type of the model's dtype.
        stored: a NumPy type of weights whose inputs have the form of the inputs of all its linear layers.
        head_stored: such a type for the output layer; that of its weights if the embedding is tied to it.
    """

    def step(arguments: Any) -> None:
        both = carray(arguments, 2)
        _run_step(both[0], both[1], storage, stored, head_stored)

    return compile_kernel(STEP, step)
