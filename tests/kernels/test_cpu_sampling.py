"""Sampling without sorting: the kept tokens, their probabilities, and the token that a number draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numba import njit

from quire.engine.sequences.sampler import filtered_probs, uniform_numbers
from quire.kernels.cpu import sampling
from quire.kernels.cpu.sampling import DRAW, UNUSABLE, sample_rows
from quire.sampling.params import GREEDY_BELOW, SamplingParams

NO_FILTER = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
FILTERS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 500, "top_p": 0.9, "min_p": 0.001, "temperature": 0.7},
)


def draws(num_rows: int, **values: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the same draw for each row, at one position after the other."""
    result = np.zeros(num_rows, DRAW)
    for name, value in (NO_FILTER | {"position": np.arange(num_rows)} | values).items():
        result[name] = value
    return result


def sampled(logits: torch.Tensor, rows: np.ndarray[Any, np.dtype[Any]]) -> list[int]:
    return sample_rows(logits, logits, rows, GREEDY_BELOW)


@njit
def _filtered(logits: int, length: int, rows: Any, scratch: int, padded: int) -> None:
    _, largest, _ = sampling._scan(logits, length)
    sampling._filter(logits, length, largest, rows[0], scratch, padded)


def kept_weights(row: torch.Tensor, **values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the weights of a row's tokens after all filters."""
    padded = sampling._padded(len(row))
    scratch = torch.zeros(sampling._scratch_bytes(len(row)) // 4)
    _filtered(row.data_ptr(), len(row), draws(1, **values), scratch.data_ptr(), padded)
    return scratch[padded : padded + len(row)].double().numpy()


def is_near_a_border(row: torch.Tensor, params: SamplingParams) -> bool:
    """Return whether rounding could decide which tokens a row keeps."""
    scaled = (row / params.temperature).double().sort(descending=True).values[: params.top_k or None]
    probs = torch.softmax(scaled, dim=-1)
    before = probs.cumsum(-1) - probs
    at_top_p = params.top_p < 1.0 and (before - params.top_p).abs().min() < 1e-5
    at_min_p = params.min_p > 0.0 and (probs / probs[0] / params.min_p - 1.0).abs().min() < 1e-5
    return bool(at_top_p or at_min_p)


rows_of_logits = st.builds(
    lambda size, scale, step, num_forbidden, seed: _random_row(size, scale, step, num_forbidden, seed),
    size=st.sampled_from([1, 2, 31, 1000, 1024, 5000, 20_000]),
    scale=st.sampled_from([0.0, 0.1, 1.0, 4.0]),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    num_forbidden=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)


def _random_row(size: int, scale: float, step: float, num_forbidden: int, seed: int) -> torch.Tensor:
    """Return normal logits, rounded to multiples of ``step`` so that many are equal, some forbidden."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(size, generator=generator) * scale
    if step:
        row = (row / step).round() * step
    forbidden = torch.randint(size, (min(num_forbidden, size - 1),), generator=generator)
    row[forbidden] = -math.inf
    return row


@settings(max_examples=150, deadline=None)
@given(
    row=rows_of_logits,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 40, 900, 10**6]),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0, exclude_max=True)),
)
def test_kept_tokens_and_probabilities_are_those_of_the_sorted_way(
    row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not is_near_a_border(row, params))
    scaled = row / torch.tensor(temperature)
    is_tiny = scaled - scaled.max() < -87.0  # the kernel takes these as 0
    expected = filtered_probs(row[None], [params])[0].masked_fill(is_tiny, 0.0).numpy()
    weights = kept_weights(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # Both calculate exponentials as float32, and differ in the last place.
    np.testing.assert_array_equal(weights > 0, expected > 0)
    np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum(), rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(row=rows_of_logits, values=st.sampled_from([each for each in FILTERS if "temperature" not in each]))
def test_a_token_is_where_the_distribution_is_inverted(row: torch.Tensor, values: dict[str, Any]) -> None:
    num_draws = 300
    tokens = np.array(sampled(row.expand(num_draws, -1), draws(num_draws, seed=9, **values)))
    weights = kept_weights(row, **values)
    cumulative = weights.cumsum() / weights.sum()
    uniform = uniform_numbers([9] * num_draws, list(range(num_draws)))
    expected = np.searchsorted(cumulative, uniform, side="right")
    # Blocks are added first, so that only a number within rounding of a border may draw the next token.
    is_at_border = np.abs(cumulative[np.minimum(tokens, expected)] - uniform) < 1e-12
    assert ((tokens == expected) | is_at_border).all()
    assert (weights[tokens] > 0).all()


@pytest.mark.parametrize("num_kept", [1, 5, 64, 1000, 1025])
def test_of_equal_tokens_the_first_are_kept(num_kept: int) -> None:
    row = torch.full((3000,), 2.0)
    row[1::2] = -0.0
    row[3::4] = 0.0
    for values in ({"top_k": 1500 + num_kept}, {"top_k": num_kept}):
        kept = np.flatnonzero(kept_weights(row, **values)).tolist()
        order = [*range(0, 3000, 2), *range(1, 3000, 2)]
        assert kept == sorted(order[: values["top_k"]])
    flat = torch.zeros(1 << 12)
    kept = np.flatnonzero(kept_weights(flat, top_p=num_kept / len(flat))).tolist()
    assert kept == list(range(num_kept))


def test_a_row_has_the_same_token_in_any_batch_and_with_any_number_of_threads() -> None:
    logits = torch.randn((12, 20_000), generator=torch.Generator().manual_seed(1)) * 2
    rows = np.concatenate([draws(2, seed=index, **each) for index, each in enumerate(FILTERS)])
    torch.set_num_threads(1)
    one_by_one = [sampled(logits[row : row + 1], rows[row : row + 1])[0] for row in range(12)]
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        assert sampled(logits, rows) == one_by_one
        assert sampled(logits.flip(0), rows[::-1].copy()) == one_by_one[::-1]
        assert sampled(logits.T.contiguous().T, rows) == one_by_one


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 1025, 5000])
def test_the_most_probable_token_is_the_first_of_equal_ones(size: int) -> None:
    logits = torch.randint(-3, 4, (20, size), generator=torch.Generator().manual_seed(size)).float() / 2
    logits[10:] -= 100
    logits[5, -1:] = 9.0
    logits[6] = -0.0
    logits[6, size // 2] = 0.0
    assert sampled(logits, draws(20, temperature=0.0)) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("values", FILTERS)
@pytest.mark.parametrize("position", [0, 1500, 2999])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, 3e38])
def test_rows_that_are_not_finite_have_no_token(bad: float, position: int, values: dict[str, Any]) -> None:
    logits = torch.randn((3, 3000), generator=torch.Generator().manual_seed(1))
    fine = sampled(logits, draws(3, **values))
    logits[1, position] = bad
    assert sampled(logits, draws(3, **values)) == [fine[0], UNUSABLE, fine[2]]
    assert sampled(torch.full((1, 3000), -math.inf), draws(1, **values)) == [UNUSABLE]


def test_logits_that_were_forbidden_must_be_finite_too() -> None:
    raw = torch.zeros((4, 100))
    raw[0, 3], raw[1, 3], raw[2, 3] = math.nan, math.inf, -math.inf
    logits = raw.clone()
    logits[:, 3] = -math.inf
    tokens = sample_rows(logits, raw, draws(4, temperature=0.0), GREEDY_BELOW)
    assert tokens == [UNUSABLE, UNUSABLE, 0, 0]


@pytest.mark.parametrize("values", FILTERS)
def test_a_forbidden_token_is_never_drawn(values: dict[str, Any]) -> None:
    row = torch.full((4000,), -math.inf)
    row[[1, 2500, 3998]] = torch.tensor([-3e30, -3e30, -3e30])
    assert set(sampled(row.expand(500, -1), draws(500, **values))) <= {1, 2500, 3998}


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_logits_of_any_size_are_cut_by_their_order(scale: float) -> None:
    row = torch.randn(9000, generator=torch.Generator().manual_seed(4)) * scale
    kept = np.flatnonzero(kept_weights(row, top_k=300))
    best = row.topk(300).indices
    expected = best[(row[best] - row.max()) >= -87.0].sort().values.tolist()
    assert kept.tolist() == expected
