"""Samples tokens on the CPU, row by row and without sorting the vocabulary.

Logits are divided by the temperature. The weight of a token is e to the power of its logit minus the largest
one. It is 0 if that difference is below -87, so a forbidden token is never drawn. Top-k, top-p and min-p keep
the first tokens in the order of logits, with ties by token id. Bisection finds the last logit that top-k and
top-p keep: each pass adds up the weights of a range of logits, and copies a range with few tokens. Typical-p
works in the same way, but orders tokens by the distance of their negative logprob from the entropy.

Then the cumulative distribution, in the order of token ids, is inverted at a uniform number, which is a
function of seed and position.

A thread computes a whole row, and adds weights as float64 in an order that depends only on the row. The token
is therefore the same in any batch, with any number of threads and any width of vectors. The same holds for
the bits of a logprob, whose logarithm is implemented here too.
"""

from __future__ import annotations

from array import array
from functools import cache
from struct import Struct
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import (
    bits_of_float,
    exact,
    exp,
    fetch_and_increment,
    float_from_bits,
    keep_apart,
    pointer,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.vector_loops import sum_powers, sum_range

UNUSABLE = -1
"""Replaces the token of a row whose logits are not finite."""

_BLOCK = 1024
"""Number of tokens in a block, whose weights are added up before the distribution is inverted."""
_LANES = 64
"""Number of tokens that are checked together for a key in a range."""
_LIST_SHARE = 64
"""A range of logits is copied once it has at most one token in this many."""
_VALUE_PASSES = 12
"""Number of passes that divide the range of values; at most 32 more then halve the floats in it."""
_NEAR_PASSES = 2
"""Number of passes that divide it near its upper end."""
_LOWEST = np.float32(-87.0)
"""Exponent below which a weight is 0."""
_MIN_THREADED_VALUES = 1 << 15
"""Values below which waking up threads costs more time than it saves."""

DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("typical_p", np.float64),
        ("seed", np.uint64),
        ("position", np.int64),
    ]
)
"""How a row's token is drawn; a temperature of 0 chooses the most probable token.

A ``top_k`` of 0, a ``top_p`` of 1, a ``min_p`` of 0 and a ``typical_p`` of 0 or 1 keep all tokens.
"""

_FIELDS = (
    "logits",
    "logits_stride",
    "raw",
    "raw_stride",
    "draws",
    "token_ids",
    "num_rows",
    "vocab_size",
    "scratch",
    "scratch_bytes",
    "next_row",
    "next_scratch",
)
_ARGUMENTS = np.dtype([*((name, np.int64) for name in _FIELDS), ("greedy_below", np.float32)])
_PACKED_ARGUMENTS = Struct(f"={len(_FIELDS)}qf")
"""Packs ``_ARGUMENTS``, in a small part of the time that NumPy takes."""

_SUM_FIELDS = ("logits", "stride", "num_rows", "vocab_size", "sums", "scratch", "next_row", "next_scratch")
_SUM_ARGUMENTS = np.dtype([(name, np.int64) for name in _SUM_FIELDS])


def sample_rows(
    logits: torch.Tensor,
    raw: torch.Tensor,
    draws: np.ndarray[Any, np.dtype[Any]],
    greedy_below: float,
) -> list[int]:
    """Return the token of each row; ``UNUSABLE`` for a row without a token.

    A row has no token if a logit is NaN, or if the largest one is infinite, before or after division by
    ``greedy_below``.

    Args:
        logits: ``[num_rows, vocab_size]``, float32.
        raw: the logits before tokens were forbidden, which must be finite too; may be ``logits`` itself.
        draws: ``[num_rows]``, of dtype ``DRAW``.
        greedy_below: the smallest temperature that divides logits.
    """
    logits, raw = _with_whole_rows(logits), _with_whole_rows(raw)
    num_rows, vocab_size = logits.shape
    num_threads = _num_threads(logits)
    scratch_bytes = _scratch_bytes(vocab_size)
    scratch = torch.empty(num_threads * scratch_bytes, dtype=torch.uint8)
    # The two counters follow the token ids.
    results = array("q", bytes(8 * (num_rows + 2)))
    results_at, _ = results.buffer_info()
    arguments = _PACKED_ARGUMENTS.pack(
        logits.data_ptr(),
        logits.stride(0),
        raw.data_ptr(),
        raw.stride(0),
        draws.ctypes.data,
        results_at,
        num_rows,
        vocab_size,
        scratch.data_ptr(),
        scratch_bytes,
        results_at + 8 * num_rows,
        results_at + 8 * num_rows + 8,
        greedy_below,
    )
    threads.run(_kernel().address, arguments, num_threads)
    return results[:num_rows].tolist()


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the sum of e to the power of each row's logits, float64 ``[num_rows]``.

    A logit minus its row's number is its logprob.

    Args:
        logits: ``[num_rows, vocab_size]``, float32.
    """
    logits = _with_whole_rows(logits)
    num_rows, vocab_size = logits.shape
    num_threads = _num_threads(logits)
    # Two counters and the scratch follow the sums.
    results = np.zeros(num_rows + 2 + num_threads * _BLOCK // 2)
    at = results.ctypes.data
    end = at + 8 * num_rows
    fields = (logits.data_ptr(), logits.stride(0), num_rows, vocab_size, at, end + 16, end, end + 8)
    arguments = np.array(fields)
    threads.run(_log_sums_kernel().address, arguments.ctypes.data, num_threads)
    return torch.from_numpy(results[:num_rows])


def _num_threads(logits: torch.Tensor) -> int:
    return min(torch.get_num_threads(), logits.shape[0]) if logits.numel() >= _MIN_THREADED_VALUES else 1


def _with_whole_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits with the values of a row next to each other."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _padded(vocab_size: int) -> int:
    return -(-vocab_size // _BLOCK) * _BLOCK


def _scratch_bytes(vocab_size: int) -> int:
    """Return the size of a thread's scratch, which ``_filter`` describes."""
    padded = _padded(vocab_size)
    return 8 * padded + 8 * (padded // _LIST_SHARE + _LANES) + 8 * (padded // _BLOCK)


@exact
def _key(x: np.float32) -> np.int32:
    """Return a float32's key: an integer with the same order. Both zeros have the same key."""
    bits = np.int32(bits_of_float(x + np.float32(0.0)))
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@exact
def _value(key: np.int32) -> np.float32:
    """Return the number of a key."""
    flip = np.int32(np.int32(key >> np.int32(31)) & np.int32(0x7FFFFFFF))
    number: np.float32 = float_from_bits(np.int32(key ^ flip))
    return number


@exact
def _scan(logits: int, length: int) -> tuple[np.int32, np.int32, np.int64]:
    """Return the smallest and the largest key of a row, and the start of the first block with the largest."""
    keep_apart()
    x = carray(pointer(logits, np.float32), (length,))
    smallest, largest = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    block = np.int64(0)
    for start in range(0, length, _BLOCK):
        high = np.int32(-0x80000000)
        for i in range(start, min(start + _BLOCK, length)):
            key = _key(x[i])
            high = max(high, key)
            smallest = min(smallest, key)
        if high > largest:
            largest, block = high, np.int64(start)
    return smallest, largest, block


@exact
def _is_finite(smallest: np.int32, largest: np.int32, divisor: np.float32) -> bool:
    """Return whether a row has no NaN, and its largest logit, divided by a number, is finite."""
    infinity = np.float32(np.inf)
    # A NaN's key lies beyond those of the infinities.
    has_nan = smallest < _key(-infinity) or largest > _key(infinity)
    return not has_nan and abs(_value(largest) / divisor) < infinity


@exact
def _first(logits: int, start: int, key: np.int32) -> int:
    """Return the index of the first logit with a key, from ``start`` on."""
    x = carray(pointer(logits, np.float32), (1,))
    while _key(x[start]) != key:
        start += 1
    return start


@exact
def _weigh(
    logits: int,
    length: int,
    temperature: np.float32,
    largest: np.float32,
    keys: int,
    weights: int,
    padded: int,
) -> None:
    """Write the key and the weight of each token, and weights of 0 for the padding."""
    keep_apart()
    x = carray(pointer(logits, np.float32), (length,))
    k = carray(pointer(keys, np.int32), (padded,))
    w = carray(pointer(weights, np.float32), (padded,))
    for i in range(length):
        scaled = x[i] / temperature
        distance = scaled - largest
        weight = exp(distance)
        k[i] = _key(scaled)
        w[i] = weight if distance >= _LOWEST else np.float32(0.0)
    for i in range(length, padded):
        k[i] = np.int32(-0x80000000)
        w[i] = np.float32(0.0)


@exact
def _has_key(keys: int, weights: int, start: int, low: np.int32, high: np.int32) -> bool:
    """Return whether one of ``_LANES`` tokens has a key in a range."""
    offset = np.int64(4 * start)
    number, _ = sum_range(keys + offset, weights + offset, np.int64(_LANES), low, high)
    return bool(number > 0)


@exact
def _copy_range(
    keys: int, weights: int, length: int, low: np.int32, high: np.int32, new_keys: int, new_weights: int
) -> int:
    """Copy the tokens with keys in a range, in order, and return their number, padded with weights of 0."""
    keep_apart()
    k = carray(pointer(keys, np.int32), (length,))
    w = carray(pointer(weights, np.float32), (length,))
    to_k = carray(pointer(new_keys, np.int32), (length,))
    to_w = carray(pointer(new_weights, np.float32), (length,))
    count = 0
    for start in range(0, length, _LANES):
        if not _has_key(keys, weights, start, low, high):
            continue
        for i in range(start, start + _LANES):
            # A token that is not in the range is overwritten by the next one.
            key = k[i]
            to_k[count], to_w[count] = key, w[i]
            count += int((key >= low) & (key <= high))
    while count % _LANES != 0:
        to_k[count], to_w[count] = np.int32(-0x80000000), np.float32(0.0)
        count += 1
    return count


@exact
def _middle(low: np.int32, high: np.int32, num_passes: int) -> np.int32:
    """Return the key, above ``low`` and up to ``high``, at which the next pass divides the range."""
    if num_passes >= _VALUE_PASSES:
        return np.int32(np.int64(high) - (np.int64(high) - np.int64(low)) // 2)
    # Most of the weight usually lies near the largest logit.
    share = 0.25 if num_passes < _NEAR_PASSES else 0.5
    least, most = np.float64(_value(low)), np.float64(_value(high))
    middle = _key(np.float32(most - (most - least) * share))
    return min(max(middle, np.int32(low + 1)), high)


@exact
def _cut(
    keys: int,
    weights: int,
    length: int,
    low: np.int32,
    high: np.int32,
    amount: float,
    counts_tokens: bool,
    copies: int,
) -> tuple[np.int32, float]:
    """Find the last key that a filter keeps, and how many of the tokens with this key it keeps.

    The filter keeps a token if the tokens before it are below a limit: a number of tokens, or a share of all
    weights.

    Args:
        keys, weights: addresses of ``length`` values, a multiple of ``_LANES``; the range from ``low`` to
            ``high`` has all weights above 0.
        amount: the number or the share.
        counts_tokens: whether it is a number.
        copies: address of scratch for the keys and weights of a copied range.

    Returns:
        The key, and the limit minus the number or weights above the key; infinity if the filter keeps all
        tokens.
    """
    keep_apart()
    count, total = sum_range(keys, weights, length, low, high)
    limit = amount if counts_tokens else amount * total
    if counts_tokens and count < limit:
        return low, np.inf
    above, num_passes = 0.0, 0
    new_weights = copies + 4 * (length // _LIST_SHARE + _LANES)
    while low < high:
        if count * _LIST_SHARE <= length and length > _LANES:
            length = _copy_range(keys, weights, length, low, high, copies, new_weights)
            keys, weights = copies, new_weights
        middle = _middle(low, high, num_passes)
        num_upper, mass = sum_range(keys, weights, length, middle, high)
        if counts_tokens:
            mass = np.float64(num_upper)
        if above + mass >= limit:
            low, count = middle, num_upper
        else:
            high, count, above = np.int32(middle - 1), count - num_upper, above + mass
        num_passes += 1
    return low, limit - above


@exact
def _drop(keys: int, weights: int, length: int, last: np.int32, room: float, counts_tokens: bool) -> None:
    """Set the weights of tokens below a key to 0, and of tokens with the key once there is no room.

    Args:
        keys, weights: addresses of ``length`` values, a multiple of ``_LANES``.
        last: the key.
        room: tokens with the key are kept until their number, or the sum of their weights, reaches this.
        counts_tokens: whether it is a number.
    """
    keep_apart()
    k = carray(pointer(keys, np.int32), (length,))
    w = carray(pointer(weights, np.float32), (length,))
    for i in range(length):
        w[i] *= np.float32(k[i] >= last)
    for start in range(0, length, _LANES):
        if not _has_key(keys, weights, start, last, last):
            continue
        for i in range(start, start + _LANES):
            if k[i] == last:
                weight = w[i]
                w[i] = weight if room > 0.0 else np.float32(0.0)
                room -= 1.0 if counts_tokens else np.float64(weight)


@exact
def _drop_light(weights: int, length: int, least: np.float32) -> None:
    """Set weights below ``least`` to 0."""
    keep_apart()
    w = carray(pointer(weights, np.float32), (length,))
    for i in range(length):
        w[i] *= np.float32(w[i] >= least)


@exact
def _drop_untypical(
    keys: int, weights: int, length: int, most: np.float32, typical_p: float, copies: int
) -> None:
    """Set the weights of all but the locally typical tokens to 0 (Meister et al., 2022).

    Tokens are ordered by the distance of their negative logprob from the entropy, its mean. The filter keeps
    the first ones whose weights sum up to a share of all weights, and all tokens as near as the last of
    these. A negative logprob is a constant minus the scaled logit, so the distances are those of scaled
    logits from their mean.

    Args:
        keys, weights: addresses of ``length`` values; the keys are overwritten.
        most: the largest scaled logit.
        copies: as for ``_cut``.
    """
    keep_apart()
    k = carray(pointer(keys, np.int32), (length,))
    w = carray(pointer(weights, np.float32), (length,))
    total, moment = 0.0, 0.0
    for i in range(length):
        weight = np.float64(w[i])
        total += weight
        if weight > 0.0:
            moment += weight * np.float64(_value(k[i]) - most)
    mean = np.float32(moment / total)
    for i in range(length):
        distance = abs((_value(k[i]) - most) - mean)
        k[i] = _key(-distance) if w[i] > np.float32(0.0) else np.int32(-0x80000000)
    low, high = _key(np.float32(2.0) * _LOWEST), _key(np.float32(0.0))
    last, _ = _cut(keys, weights, length, low, high, typical_p, False, copies)
    for i in range(length):
        w[i] *= np.float32(k[i] >= last)


@exact
def _uniform(seed: np.uint64, position: int) -> float:
    """Return a number in [0, 1) for a seed and a position: SplitMix64 (Steele et al., OOPSLA 2014)."""
    mixed = _mix(seed) + np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
    return np.float64(_mix(mixed) >> np.uint64(11)) * 2.0**-53


@exact
def _mix(z: np.uint64) -> np.uint64:
    z = np.uint64(z + np.uint64(0x9E3779B97F4A7C15))
    z = np.uint64((z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    z = np.uint64((z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(z ^ (z >> np.uint64(31)))


@exact
def _add_blocks(weights: int, length: int, block_sums: int) -> float:
    """Write the sum of each block of weights; return the sum of all weights."""
    keep_apart()
    blocks = carray(pointer(block_sums, np.float64), (length // _BLOCK,))
    total = 0.0
    for block in range(length // _BLOCK):
        at = weights + np.int64(4 * _BLOCK * block)
        # The bits of the weights serve as keys: weights are not negative, so all of them are in the range.
        _, blocks[block] = sum_range(at, at, np.int64(_BLOCK), np.int32(0), np.int32(0x7FFFFFFF))
        total += blocks[block]
    return total


@exact
def _invert(weights: int, length: int, uniform: float, block_sums: int) -> int:
    """Return the first token whose weight, with all weights before it, is more than a share of all weights.

    If all sums are lower because of rounding, return the last token with a weight above 0.
    """
    keep_apart()
    w = carray(pointer(weights, np.float32), (length,))
    blocks = carray(pointer(block_sums, np.float64), (length // _BLOCK,))
    target = uniform * _add_blocks(weights, length, block_sums)
    before, start, reached = 0.0, 0, 0.0
    for block in range(length // _BLOCK):
        if blocks[block] > 0.0:
            start, before = block * _BLOCK, reached
            reached += blocks[block]
            if reached > target:
                break
    token = start
    for i in range(start, start + _BLOCK):
        if w[i] > np.float32(0.0):
            token = i
            before += np.float64(w[i])
            if before > target:
                break
    return token


@exact
def _filter(logits: int, length: int, largest: np.int32, draw: Any, scratch: int, padded: int) -> None:
    """Write the weights of a row's tokens to the scratch; tokens that must not be drawn get 0.

    Args:
        logits: address of ``length`` logits.
        largest: the largest key of a logit.
        draw: a ``DRAW``.
        scratch: address of ``_scratch_bytes`` bytes: keys, weights, copies of some, and the sums of blocks.
        padded: the length, rounded up to whole blocks.
    """
    keep_apart()
    keys, weights, copies = scratch, scratch + 4 * padded, scratch + 8 * padded
    most = np.float32(_value(largest) / draw.temperature)
    _weigh(logits, length, draw.temperature, most, keys, weights, padded)
    low, high = _key(np.float32(most + _LOWEST)), _key(most)
    if 0 < draw.top_k < length:
        low, room = _cut(keys, weights, padded, low, high, np.float64(draw.top_k), True, copies)
        _drop(keys, weights, padded, low, room, True)
    if draw.top_p < 1.0:
        low, room = _cut(keys, weights, padded, low, high, draw.top_p, False, copies)
        _drop(keys, weights, padded, low, room, False)
    if draw.min_p > np.float32(0.0):
        _drop_light(weights, padded, draw.min_p)
    if 0.0 < draw.typical_p < 1.0:
        _drop_untypical(keys, weights, padded, most, draw.typical_p, copies)


@exact
def _draw(scratch: int, padded: int, uniform: float) -> int:
    """Return the token that a uniform number draws from the weights that ``_filter`` wrote."""
    block_sums = scratch + 8 * padded + 8 * (padded // _LIST_SHARE + _LANES)
    token: int = _invert(scratch + 4 * padded, padded, uniform, block_sums)
    return token


@exact
def _log(x: float) -> float:
    """Return the natural logarithm of a number of at least 1; libraries have separate code per processor.

    The number is halved until the series of the inverse hyperbolic tangent converges fast.
    """
    num_halved = 0.0
    while x > 1.4142135623730951:
        x *= 0.5
        num_halved += 1.0
    ratio = (x - 1.0) / (x + 1.0)
    square, series = ratio * ratio, 0.0
    for power in range(21, 0, -2):
        series = series * square + 1.0 / power
    return num_halved * 0.6931471805599453 + 2.0 * ratio * series


@exact
def _log_sum(logits: int, length: int, scratch: int) -> float:
    """Return the logarithm of the sum of e to the power of a row's logits; the scratch has one block."""
    _, largest, _ = _scan(logits, length)
    most, total = _value(largest), 0.0
    for start in range(0, length, _BLOCK):
        size = min(_BLOCK, length - start)
        _raise(logits + 4 * start, size, most, scratch)
        total += np.float64(sum_powers(scratch, np.int64(size), np.float32(0.0), 1))
    log_sum: float = np.float64(most) + _log(total)
    return log_sum


@exact
def _raise(logits: int, length: int, most: np.float32, powers: int) -> None:
    """Write e to the power of each logit minus the largest one."""
    keep_apart()
    x = carray(pointer(logits, np.float32), (length,))
    p = carray(pointer(powers, np.float32), (length,))
    for i in range(length):
        p[i] = exp(x[i] - most)


@cache
def _log_sums_kernel() -> Any:
    """Compile the function that each thread runs: it takes the next row until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        scratch = args.scratch + np.int64(4 * _BLOCK) * np.int64(fetch_and_increment(args.next_scratch))
        sums = carray(pointer(args.sums, np.float64), (args.num_rows,))
        while True:
            row = np.int64(fetch_and_increment(args.next_row))
            if row >= args.num_rows:
                break
            sums[row] = _log_sum(args.logits + 4 * row * args.stride, args.vocab_size, scratch)

    return compile_kernel(_SUM_ARGUMENTS, kernel)


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next row until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        scratch = args.scratch + args.scratch_bytes * np.int64(fetch_and_increment(args.next_scratch))
        length = args.vocab_size
        draws = carray(pointer(args.draws, DRAW), (args.num_rows,))
        token_ids = carray(pointer(args.token_ids, np.int64), (args.num_rows,))
        while True:
            row = np.int64(fetch_and_increment(args.next_row))
            if row >= args.num_rows:
                break
            logits = args.logits + 4 * row * args.logits_stride
            smallest, largest, block = _scan(logits, length)
            is_usable = _is_finite(smallest, largest, args.greedy_below)
            if args.raw != args.logits:
                raw_smallest, raw_largest, _ = _scan(args.raw + 4 * row * args.raw_stride, length)
                is_usable = is_usable and _is_finite(raw_smallest, raw_largest, np.float32(1.0))
            if not is_usable:
                token_ids[row] = UNUSABLE
            elif draws[row].temperature == np.float32(0.0):
                token_ids[row] = _first(logits, block, largest)
            else:
                draw, padded = draws[row], (length + _BLOCK - 1) // _BLOCK * _BLOCK
                _filter(logits, length, largest, draw, scratch, padded)
                token_ids[row] = _draw(scratch, padded, _uniform(draw.seed, draw.position))

    return compile_kernel(_ARGUMENTS, kernel)
