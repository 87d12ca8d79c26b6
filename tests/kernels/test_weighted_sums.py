"""Weighted sums of each token's rows: the order of additions, one token alone, and any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.cpu.weighted_sums import Int64s, weighted_sums
from tests.testing.linear_layers import in_pairs

NUM_TOKENS, NUM_PLACES, NUM_ROWS, WIDTH = 300, 3, 500, 137
SEGMENTS = np.sort(np.random.Generator(np.random.PCG64(2)).integers(0, 7, NUM_ROWS))


def drawn() -> tuple[torch.Tensor, torch.Tensor, Int64s]:
    """Return rows, their factors, and up to three rows of each token."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn((NUM_ROWS, 192), generator=generator)[:, :WIDTH]
    places = torch.randint(0, NUM_ROWS + 100, (NUM_TOKENS, NUM_PLACES), generator=generator)
    return values, torch.randn(NUM_ROWS, generator=generator), places.sort(dim=1).values.numpy()


def expected_sum(values: torch.Tensor, factors: torch.Tensor, rows: list[int], piece: range) -> torch.Tensor:
    """Return one token's sum in a piece, by torch's operators."""
    segments = [torch.zeros(WIDTH) for _ in piece]
    for row in rows:
        if row < NUM_ROWS and SEGMENTS[row] in piece:
            segments[SEGMENTS[row] - piece.start] += values[row] * factors[row]
    return in_pairs(segments)


@pytest.mark.parametrize("pieces", [[0, 8], [0, 1, 2, 4, 8], [0, 4, 6, 7]])
def test_rows_are_added_by_segment_and_segments_in_pairs(pieces: list[int]) -> None:
    values, factors, places = drawn()
    found = weighted_sums(values, factors, SEGMENTS, places, np.array(pieces))
    assert found.shape == (len(pieces) - 1, NUM_TOKENS, WIDTH)
    for index, sums in enumerate(found):
        piece = range(*pieces[index : index + 2])
        for token in range(0, NUM_TOKENS, 7):
            rows = places[token].tolist()
            assert torch.equal(sums[token], expected_sum(values, factors, rows, piece)), (piece, token)


def test_a_token_does_not_depend_on_the_others_or_on_threads() -> None:
    values, factors, places = drawn()
    pieces = np.array([0, 8])
    expected = weighted_sums(values, factors, SEGMENTS, places, pieces)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for start, end in ((0, 300), (7, 8), (100, 120)):
            found = weighted_sums(values, factors, SEGMENTS, places[start:end].copy(), pieces)
            assert torch.equal(found, expected[:, start:end])
