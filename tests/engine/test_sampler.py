"""Sampling: filters, seeds, logprobs, minimum lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from quire.engine.sequences import sampler
from quire.engine.sequences.sampler import filtered_probs, sample, uniform_numbers
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams


def sequence(position: int = 4, **params: Any) -> Sequence:
    return Sequence("r", list(range(position)), position, SamplingParams(**params), b"")


@pytest.fixture(params=["kernel", "torch"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample with the kernel for CPUs, and with torch's operators, as on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(sampler, "_choose_with_kernel", sampler._choose_with_torch)


def draw_many(logits: list[float], num_draws: int = 2000, **params: Any) -> list[int]:
    sequences = [sequence(seed=seed, **params) for seed in range(num_draws)]
    return sample(torch.tensor([logits] * num_draws), sequences, frozenset()).token_ids


@pytest.mark.usefixtures("_both_ways")
def test_draws_follow_the_distribution() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    tokens = draw_many(logits, 20_000)
    shares = [tokens.count(token) / len(tokens) for token in range(4)]
    assert shares == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.01)


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.25}, {0, 1, 2}),
        # The entropy is 1.14 nats; the surprises are 0.69, 1.20, 1.90 and 3.00.
        ({"typical_p": 0.3}, {1}),
        ({"typical_p": 0.31}, {0, 1}),
        ({"typical_p": 0.81}, {0, 1, 2}),
        ({"typical_p": 0.31, "top_k": 1}, {0}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_a_filter_keeps_exactly_its_tokens(params: dict[str, Any], allowed: set[int]) -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draw_many(logits, **params)) == allowed


@pytest.mark.parametrize("typical_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (40, 0.9, 0.02)])
def test_typical_tokens_are_those_of_transformers(
    typical_p: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn((64, 300), generator=torch.Generator().manual_seed(3)) * 2
    values: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
    }
    config = GenerationConfig(do_sample=True, **values)
    # These filters are in transformers' own order, and none of them reads the ids.
    filters = GenerationMixin()._get_logits_processor(config)
    expected = filters(torch.zeros((64, 1), dtype=torch.int64), logits)
    kept = filtered_probs(logits, [SamplingParams(**values)] * 64) > 0
    assert torch.equal(kept, torch.isfinite(expected))
    assert kept.sum() < kept.numel()


@pytest.mark.usefixtures("_both_ways")
def test_a_row_does_not_see_the_typical_tokens_of_others() -> None:
    logits = torch.randn((2, 50), generator=torch.Generator().manual_seed(0))
    plain, typical = sequence(seed=5), sequence(seed=6, typical_p=0.2)
    singles = [
        sample(logits[[row]], [each], frozenset()).token_ids[0] for row, each in enumerate((plain, typical))
    ]
    assert sample(logits, [plain, typical], frozenset()).token_ids == singles


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e-38, 9e-6, 1.1e-5])
def test_a_temperature_near_zero_takes_the_most_probable_token(temperature: float) -> None:
    logits = torch.randn((8, 300), generator=torch.Generator().manual_seed(1)) * 30
    sequences = [sequence(seed=seed, temperature=temperature) for seed in range(8)]
    assert sample(logits, sequences, frozenset()).token_ids == logits.argmax(dim=-1).tolist()


@pytest.mark.usefixtures("_both_ways")
def test_a_token_depends_only_on_seed_and_position() -> None:
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(0))
    others = [sequence(seed=8), sequence(temperature=0.0)]
    [single] = sample(logits[:1], [sequence(seed=5)], frozenset()).token_ids
    assert sample(logits, [sequence(seed=5), *others], frozenset()).token_ids[0] == single


def test_uniform_numbers_are_fixed() -> None:
    numbers = uniform_numbers([0, 0, 1], [0, 1, 0])
    assert numbers.tolist() == uniform_numbers([0, 0, 1], [0, 1, 0]).tolist()
    assert len(set(numbers.tolist())) == 3
    assert ((numbers >= 0) & (numbers < 1)).all()


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9}, {"typical_p": 0.9}])
def test_rows_that_are_not_finite_have_an_error_each(params: dict[str, Any]) -> None:
    logits = torch.zeros((6, 3))
    logits[1, 2], logits[2, 0], logits[3, 1], logits[4] = math.nan, math.inf, -math.inf, -math.inf
    logits[5, 1] = 3e38
    sampled = sample(logits, [sequence(seed=row, **params) for row in range(6)], frozenset())
    assert set(sampled.errors) == {1, 2, 4, 5}
    assert {error.__class__.__name__ for error in sampled.errors.values()} == {"RequestFailedError"}
    assert sampled.token_ids[3] != 1


@pytest.mark.usefixtures("_both_ways")
def test_rules_do_not_hide_logits_that_are_not_finite() -> None:
    logits = torch.tensor([[math.nan, 0.0, 1.0], [0.0, 1.0, 2.0]])
    allowed = [sequence(seed=seed, allowed_token_ids=frozenset({1})) for seed in range(2)]
    sampled = sample(logits, allowed, frozenset())
    assert set(sampled.errors) == {0}
    assert sampled.token_ids[1] == 1


def test_torch_and_the_kernel_draw_the_same_tokens() -> None:
    logits = torch.randn((40, 3000), generator=torch.Generator().manual_seed(2)) * 3
    values: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 7},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.01, "top_k": 100, "top_p": 0.95},
    ]
    sequences = [sequence(seed=row, **values[row % len(values)]) for row in range(len(logits))]
    expected = sampler._choose_with_torch(logits, logits, sequences)
    assert sampler._choose_with_kernel(logits, logits, sequences) == expected


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    [logprobs] = sample(logits, [sequence(temperature=0.0, num_logprobs=2)], frozenset()).logprobs
    assert logprobs is not None
    expected = torch.log_softmax(logits[0], dim=-1)
    assert logprobs.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in logprobs.top] == [1, 2]


def test_no_end_before_min_tokens() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]])
    early = sequence(temperature=0.0, min_tokens=1, stop_token_ids=frozenset({2}))
    assert sample(logits, [early], frozenset({1})).token_ids == [0]
