"""Makes requests with the lengths of the paper's two data sets.

The paper publishes only the means: ShareGPT 161 input and 338 output tokens, Alpaca 19 and 58. Lengths are
sampled from log-normal distributions, with those means after truncation at the model's maximum; the widths
are assumptions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MAX_LENGTH = 2048
"""Tokens of the longest sequence, as in the paper's OPT models."""


class Request(NamedTuple):
    """The numbers of tokens in a request's prompt and in its output."""

    num_input: int
    num_output: int


class Lengths(NamedTuple):
    """A data set as two log-normal distributions, truncated at the maximal length.

    Attributes:
        means: mean input and output tokens.
        sigmas: standard deviations of their logarithms.
    """

    name: str
    means: tuple[float, float]
    sigmas: tuple[float, float]

    def draw(self, num_requests: int, seed: int = 0) -> list[Request]:
        """Return requests, which depend only on the arguments."""
        random = np.random.default_rng(seed)
        inputs, outputs = (
            _cut_log_normal(random.standard_normal(num_requests), mean, sigma, MAX_LENGTH // 2)
            for mean, sigma in zip(self.means, self.sigmas, strict=True)
        )
        return [Request(int(a), int(b)) for a, b in zip(inputs, outputs, strict=True)]


def _cut_log_normal(normal: np.ndarray, mean: float, sigma: float, longest: int) -> np.ndarray:
    """Return lengths from 1 to ``longest`` with this mean; bisection finds the distribution's location."""

    def lengths(location: float) -> np.ndarray:
        return np.clip(np.rint(np.exp(location + sigma * normal)), 1, longest)

    low, high = -5.0, 15.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    return lengths(high)


SHAREGPT = Lengths("ShareGPT-like", (161.0, 338.0), (1.2, 0.9))
ALPACA = Lengths("Alpaca-like", (19.0, 58.0), (0.6, 0.9))
