"""Selective scans (Mamba 1, arXiv 2312.00752) on the CPU, token by token, with states in KV blocks.

::

    x = silu(convolution of the last inputs)        d = softplus(step)
    S = exp(rate * d) S + b (d x)                   y = c S + D x

The steps and the vectors b and c are computed from x. A state has a row for each element of b, and a column
for each channel; each of its elements decays at a rate of its own. Channels are divided into heads, which are
updated apart. Each token's state follows from the one before it in one order of operations, in float32. So
the bits do not depend on how a sequence was split into steps, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import exact, exp, fetch_and_increment, keep_apart, pointer
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.recurrence import (
    PLACE_FIELDS,
    StatePlaces,
    convolve,
    new_tokens,
    num_conv_rows,
    place_values,
    row_at,
    run,
    softplus,
)
from quire.kernels.metadata import AttentionMetadata

_MOST_CHANNELS = 128
"""Channels of a head at most: the state of a head should stay in the processor's nearest cache."""

Select = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
"""Returns the steps ``[num_tokens, num_channels]``, and b and c ``[num_tokens, num_rates]``, of inputs."""


class SelectiveScan(NamedTuple):
    """The weights of a layer, all in float32.

    Attributes:
        taps: ``[num_taps, num_channels]``; the last one belongs to the token itself.
        conv_bias: ``[num_channels]``.
        rates: ``[num_rates, num_channels]``, negative.
        skip: ``[num_channels]``, the factor ``D`` of an input in its output.
        select: computes the steps, b and c of the layer.
    """

    taps: torch.Tensor
    conv_bias: torch.Tensor
    rates: torch.Tensor
    skip: torch.Tensor
    select: Select

    @property
    def num_outputs(self) -> int:
        """Outputs for each token: one for each channel."""
        return len(self.skip)

    @property
    def key_dim(self) -> int:
        """Rows of the state of a head."""
        return len(self.rates)

    @property
    def row_size(self) -> int:
        """Channels of a head, and thus numbers in a row of its state."""
        return gcd(self.num_outputs, _MOST_CHANNELS)

    @property
    def num_rows(self) -> int:
        """Rows of a state: those of all heads, then the inputs of the convolution."""
        num_heads = self.num_outputs // self.row_size
        return num_heads * self.key_dim + num_conv_rows(self.taps, self.row_size)

    def advance(
        self, inputs: torch.Tensor, steps: torch.Tensor, metadata: AttentionMetadata, places: StatePlaces
    ) -> torch.Tensor:
        """See ``Recurrence.advance``; the steps are computed from the inputs, and ``steps`` is not used."""
        num_heads, size = self.num_outputs // self.row_size, self.row_size
        conv_places = places._replace(first_row=places.first_row + num_heads * self.key_dim)
        mixed = convolve(inputs, self.taps, self.conv_bias, metadata, conv_places, size)
        selected = [each.float().contiguous() for each in self.select(mixed)]
        outputs = torch.empty_like(mixed)
        tensors = (mixed, *selected, outputs, self.rates, self.skip)
        scratch = torch.empty((metadata.block_tables.shape[1] * num_heads, 2, size))
        numbers = (len(mixed), self.num_outputs, num_heads, self.key_dim, 0)
        values = (*(each.data_ptr() for each in (*tensors, scratch)), *numbers)
        run(_kernel(), _FIELDS, (*values, *place_values(metadata, places, size)))
        return outputs


_FIELDS = (
    *("mixed", "steps", "b", "c", "outputs", "rates", "skip", "scratch"),
    *("num_tokens", "num_channels", "num_heads", "num_rates", "next_task"),
    *PLACE_FIELDS,
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])


@exact
def _advance_row(row: int, rates: int, paces: int, output: int, num: int, b: Any, c: Any) -> None:
    """Update a row of a state, and add its part of the output; b and c are the row's elements of these."""
    keep_apart()
    state, rate = carray(pointer(row, np.float32), (num,)), carray(pointer(rates, np.float32), (num,))
    step, change = carray(pointer(paces, np.float32), (2, num))
    total = carray(pointer(output, np.float32), (num,))
    for i in range(num):
        state[i] = exp(rate[i] * step[i]) * state[i] + b * change[i]
        total[i] += c * state[i]


@exact
def _begin_row(args: Any, sequence: int, position: int, row: int) -> int:
    """Return the address of a row of the state, after its values before a token were copied there."""
    target = row_at(args, sequence, position, row)
    state = carray(pointer(target, np.float32), (args.row_size,))
    if position == 0:
        state[:] = np.float32(0.0)
    elif position % args.block_size == 0:
        source = row_at(args, sequence, position - 1, row)
        state[:] = carray(pointer(source, np.float32), (args.row_size,))
    return int(target)


@exact
def _begin_token(mixed: int, steps: int, skip: int, paces: int, output: int, num: int) -> None:
    """Compute the steps, their products with the inputs, and the first term of the outputs."""
    keep_apart()
    x, step = carray(pointer(mixed, np.float32), (num,)), carray(pointer(steps, np.float32), (num,))
    pace = carray(pointer(paces, np.float32), (2, num))
    factor, total = carray(pointer(skip, np.float32), (num,)), carray(pointer(output, np.float32), (num,))
    for i in range(num):
        pace[0, i] = softplus(step[i])
        pace[1, i] = pace[0, i] * x[i]
        total[i] = factor[i] * x[i]


@exact
def _advance_head(args: Any, sequence: int, head: int) -> None:
    """Update the state of one head over the new tokens of a sequence, and write its outputs."""
    keep_apart()
    first, num_new, start = new_tokens(args, sequence)
    size, low = args.row_size, 4 * head * args.row_size
    paces = args.scratch + 8 * (sequence * args.num_heads + head) * size
    for position in range(start, start + num_new):
        token = first + position - start
        at = 4 * token * args.num_channels + low
        _begin_token(args.mixed + at, args.steps + at, args.skip + low, paces, args.outputs + at, size)
        b = carray(pointer(args.b + 4 * token * args.num_rates, np.float32), (args.num_rates,))
        c = carray(pointer(args.c + 4 * token * args.num_rates, np.float32), (args.num_rates,))
        for i in range(args.num_rates):
            row = _begin_row(args, sequence, position, head * args.num_rates + i)
            rates = args.rates + 4 * i * args.num_channels + low
            _advance_row(row, rates, paces, args.outputs + at, size, b[i], c[i])


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next task until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        while True:
            task = np.int64(fetch_and_increment(args.next_task))
            if task >= args.num_sequences * args.num_heads:
                break
            _advance_head(args, task // args.num_heads, task % args.num_heads)

    return compile_kernel(_ARGUMENTS, kernel)
