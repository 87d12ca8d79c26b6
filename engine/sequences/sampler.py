"""Samples tokens from logits.

A counter-based generator gives one uniform number per (seed, position), and every other operation works row
by row. A token therefore never depends on the other sequences in the batch. The token is the one at which the
cumulative distribution, in the order of token ids, exceeds the uniform number.

On the CPU a kernel does all of this without sorting the vocabulary (``kernels/cpu/sampling.py``). On a GPU
torch's operators sort each row.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
import torch

from quire.engine.errors import RequestFailedError, request_error
from quire.engine.sequences.logits_processing import process_logits
from quire.engine.sequences.sequence import Sequence, TokenLogprobs
from quire.kernels.cpu import sampling as kernels
from quire.kernels.cpu.sampling import DRAW, UNUSABLE
from quire.sampling.params import GREEDY_BELOW, SamplingParams

logger = logging.getLogger(__name__)


class SampledTokens(NamedTuple):
    """One token for each row of logits, and its logprobs if the sequence asked for them.

    Attributes:
        token_ids: the token of each row.
        logprobs: the logprobs of each row; None if they were not requested.
        errors: for each row without a token, the reason; the other lists have meaningless entries for such a
            row.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, RequestFailedError]


def sample(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> SampledTokens:
    """Sample the next token of each sequence; a sequence that fails does not affect the others.

    Args:
        logits: ``[num_sequences, vocab_size]``; any float type.
        sequences: the owner of each row.
        eos_token_ids: forbidden to a sequence that has not reached its ``min_tokens``.
    """
    try:
        return _sample(logits, sequences, eos_token_ids)
    except Exception as error:
        if len(sequences) == 1:
            logger.exception("attempt %s cannot be sampled", sequences[0].attempt_id)
            return SampledTokens([0], [None], {0: request_error(error)})
    # Rows are independent, so sampling them one by one gives each the same token.
    alone = [sample(logits[row : row + 1], [each], eos_token_ids) for row, each in enumerate(sequences)]
    return SampledTokens(
        [each.token_ids[0] for each in alone],
        [each.logprobs[0] for each in alone],
        {row: each.errors[0] for row, each in enumerate(alone) if each.errors},
    )


def _sample(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> SampledTokens:
    """Sample all rows at once, see ``sample``; an exception in one row fails all of them."""
    raw = logits.float()
    processed = process_logits(raw, sequences, eos_token_ids)
    choose = _choose_with_kernel if raw.is_cpu else _choose_with_torch
    ids = choose(processed, raw, sequences)
    errors = {row: _error(sequences[row]) for row, token_id in enumerate(ids) if token_id == UNUSABLE}
    for row in errors:
        ids[row] = 0
    return SampledTokens(ids, _logprobs(raw, ids, sequences), errors)


def _choose_with_kernel(logits: torch.Tensor, raw: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the token of each row without sorting the row; ``UNUSABLE`` if the row is not finite.

    Args:
        logits: ``[num_sequences, vocab_size]``, float32, on the CPU.
        raw: the logits before the rules of sequences were applied.
        sequences: the owner of each row.
    """
    return kernels.sample_rows(logits, raw, _draws(sequences), GREEDY_BELOW)


def _draws(sequences: list[Sequence]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Return the kernel's sampling parameters for the next token of each sequence, of dtype ``DRAW``."""
    for sequence in sequences:
        if not sequence.draw:
            sequence.draw = _draw(sequence)
    draws = np.frombuffer(bytearray().join([sequence.draw for sequence in sequences]), DRAW)
    draws["position"] = [len(sequence.token_ids) for sequence in sequences]
    return draws


def _draw(sequence: Sequence) -> bytes:
    """Return a ``DRAW`` without the position, which is the same for all of a sequence's tokens."""
    params = sequence.params
    draw = np.zeros((), DRAW)
    if not params.is_greedy:
        draw["temperature"] = params.temperature
        draw["top_k"] = min(params.top_k, np.iinfo(np.int64).max)
        draw["top_p"] = params.top_p
        draw["min_p"] = params.min_p
        draw["typical_p"] = params.typical_p
        draw["seed"] = sequence.seed
    return draw.tobytes()


def _choose_with_torch(logits: torch.Tensor, raw: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the same as ``_choose_with_kernel``, on any device."""
    token_ids = logits.argmax(dim=-1)
    is_good = _are_usable(logits.gather(1, token_ids[:, None])[:, 0])
    if logits is not raw:  # the rules may have hidden logits that are not finite
        is_good &= are_finite(raw)
    sampled_rows = [row for row, s in enumerate(sequences) if not s.params.is_greedy]
    if sampled_rows:
        sampled = [sequences[row] for row in sampled_rows]
        index = torch.tensor(sampled_rows, device=logits.device)
        token_ids[index] = _sample_with_torch(logits[index], sampled)
    # One copy brings tokens and errors to the host, since each copy waits for the GPU.
    ids: list[int] = torch.where(is_good, token_ids, UNUSABLE).tolist()
    return ids


def are_finite(logits: torch.Tensor) -> torch.Tensor:
    """Return whether each row can be sampled: it must have no NaN and no positive infinity.

    Minus infinity marks impossible tokens. It is allowed unless all tokens have it.
    """
    # The maximum is NaN if any logit is.
    return torch.isfinite(logits.amax(dim=-1))


def _are_usable(largest: torch.Tensor) -> torch.Tensor:
    """Return whether the largest logit of each row is finite, also after division by the temperature."""
    return torch.isfinite(largest / GREEDY_BELOW)


def _error(sequence: Sequence) -> RequestFailedError:
    rules = sequence.logits_rules
    if rules is not None and rules.error is not None:
        return request_error(rules.error)
    return not_finite()


def not_finite() -> RequestFailedError:
    """Return the error of a request for which the model's logits are not finite."""
    return RequestFailedError("the model's logits are not finite")


def _sample_with_torch(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Return a token id for each row, by inverting the row's cumulative distribution at a uniform number."""
    probs = filtered_probs(logits, [s.params for s in sequences])
    cumulative = probs.cumsum(dim=-1)
    uniform = torch.from_numpy(
        uniform_numbers([s.seed for s in sequences], [s.num_tokens for s in sequences])
    )
    total = cumulative[:, -1:].contiguous()
    target = uniform.to(logits.device)[:, None] * total
    token_ids = torch.searchsorted(cumulative, target, right=True)
    # If the target equals the total after rounding, this chooses the last token with a probability.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(token_ids, last)[:, 0]


def filtered_probs(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Return the probability of each token, 0 for tokens that are not to be sampled.

    Rows are divided by the temperature and sorted, ties by token id. Then they are truncated, in
    transformers' order: top-k, top-p, min-p, typical-p.

    Args:
        logits: ``[num_rows, vocab_size]``, float32.
        params: the parameters of each row.

    Returns:
        The probabilities, ``[num_rows, vocab_size]``, float64, not normalized.
    """
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    scaled, order = (logits / temperature[:, None]).sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(scaled, dim=-1).double()
    vocab_size = probs.shape[-1]
    top_k = torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=device)
    keep = torch.arange(vocab_size, device=device)[None, :] < top_k[:, None]
    probs = probs * keep
    probs /= probs.sum(dim=-1, keepdim=True)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    # A token is kept if the probability mass before it is below top_p, so the most probable token always is.
    before = probs.cumsum(dim=-1) - probs
    keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
    keep &= probs >= min_p[:, None] * probs[:, :1]
    if any(p.typical_p < 1.0 for p in params):
        typical_p = torch.tensor([p.typical_p for p in params], dtype=torch.float64, device=device)
        keep &= _typical(probs * keep, typical_p)
    return torch.zeros_like(probs).scatter_(1, order, probs * keep)


def _typical(probs: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Return the locally typical tokens of each row (Meister et al., 2022), as transformers finds them.

    Tokens are ranked by the distance of their negative logprob from the entropy, the nearest first. The
    result is the shortest list whose probabilities sum up to ``typical_p``, and all tokens that are as near
    as its last one.

    Args:
        probs: ``[num_rows, vocab_size]``, not normalized; 0 for tokens that are already excluded.
        typical_p: ``[num_rows]``; all tokens of a row with 1 are kept.
    """
    probs = probs / probs.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
    distance = (-probs.log() - entropy).abs()
    nearest, order = distance.sort(dim=-1, stable=True)
    mass = probs.gather(1, order).cumsum(dim=-1)
    last = (mass < typical_p[:, None]).sum(dim=-1, keepdim=True).clamp(max=probs.shape[-1] - 1)
    is_near: torch.Tensor = distance <= nearest.gather(1, last)
    return is_near | (typical_p[:, None] >= 1.0)


def uniform_numbers(seeds: list[int], positions: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return one number in [0, 1) for each (seed, position): SplitMix64 (Steele et al., OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        z = _mix(np.array(seeds, dtype=np.uint64)) + np.array(positions, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _logprobs(
    logits: torch.Tensor, token_ids: list[int], sequences: list[Sequence]
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(sequences)
    rows_by_num_top: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        if (num_top := sequence.params.num_logprobs) is not None:
            rows_by_num_top.setdefault(num_top, []).append(row)
    # Rows with equal num_top are ranked together, since each ranking makes the host wait for the GPU.
    for num_top, rows in rows_by_num_top.items():
        ranked = rank_tokens(logits[rows], [token_ids[row] for row in rows], num_top)
        for row, logprobs in zip(rows, ranked, strict=True):
            result[row] = logprobs
    return result


def rank_tokens(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """Return, for each row of logits, the logprob of its token and those of the ``num_top`` best tokens."""
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0]
    values, ids = logits.topk(min(num_top, logits.shape[-1]))
    rows = zip(chosen.tolist(), log_sums(logits).tolist(), ids.tolist(), values.tolist(), strict=True)
    return [
        TokenLogprobs(logit - total, list(zip(best, [each - total for each in best_logits], strict=True)))
        for logit, (total,), best, best_logits in rows
    ]


def log_sums(logits: torch.Tensor) -> torch.Tensor:
    """Return each row's log-sum-exp, float64 ``[num_rows, 1]``, to subtract from logits to get logprobs."""
    sums = kernels.log_sums(logits) if logits.is_cpu else torch.logsumexp(logits.double(), dim=-1)
    return sums[:, None]
