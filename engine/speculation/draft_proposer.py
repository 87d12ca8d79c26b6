"""Proposes draft tokens of a smaller model, which has the same vocabulary and separate paged blocks.

The draft model samples with the random numbers that the sequence itself will use at the same positions. Both
models invert their cumulative distributions at the same number, so they agree more often than two independent
samples would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from quire.engine.kv_cache.block_pool import NoFreeBlocksError
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.window_pool import pool_of
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sampler import sample
from quire.engine.sequences.sequence import ScheduledSequence, Sequence
from quire.engine.speculation.speculator import DraftRequest
from quire.engine.weights.loader import LoadedModel


@dataclass(slots=True)
class Lookahead:
    """The draft model's copy of a sequence, with draft tokens at its end.

    Attributes:
        copy: the copied sequence, with block table and hashes of the draft model.
        num_known: how many leading tokens the copy shares with the sequence; draft tokens follow.
        target_length: number of tokens that the copy will have after this step.
    """

    copy: Sequence
    num_known: int
    target_length: int = 0


class DraftProposer:
    """Runs a draft model ahead of the sequences.

    The keys and values of accepted tokens are kept, and sequences with a common prefix share blocks. A prompt
    is computed in chunks, one per step, and there are no draft tokens until all of it is computed. If there
    are no blocks or positions left for a sequence, it gets no draft tokens.

    Args:
        model: the draft model.
        memory: the draft model's KV blocks.
        limits: limits of the engine's steps, which also apply to the draft model.
        eos_token_ids: end-of-sequence tokens of the model that verifies.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: KvMemory,
        limits: SchedulerConfig,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.pool = pool_of(memory)
        self._tables = BlockTables(self.pool, limits.block_size)
        self._max_step_tokens = limits.max_num_batched_tokens
        self._runner = ModelRunner(model, memory)
        self._max_num_tokens = model.max_position_embeddings
        self._eos_token_ids = eos_token_ids
        self._lookaheads: dict[Sequence, Lookahead] = {}

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """Return draft tokens for each sequence; see ``Proposer.propose``."""
        self._forget_finished()
        ahead = [self._follow(each) for each in requests]
        self._extend_drafts(ahead)
        return [each.copy.token_ids[each.num_known :] for each in ahead]

    def _forget_finished(self) -> None:
        for sequence in [sequence for sequence in self._lookaheads if sequence.status.is_finished]:
            self.pool.free(self._lookaheads.pop(sequence).copy.block_table)

    def _follow(self, request: DraftRequest) -> Lookahead:
        """Update a sequence's copy to its current tokens; keep the blocks of draft tokens that were right."""
        sequence = request.sequence
        ahead = self._lookaheads.get(sequence)
        if ahead is None:
            ahead = self._lookaheads[sequence] = Lookahead(_blank_copy(sequence), sequence.num_tokens)
            self._tables.take_cached_prefix(ahead.copy, max_tokens=sequence.num_tokens - 1)
        copy, num_right = ahead.copy, ahead.num_known
        following = sequence.token_ids[ahead.num_known :]
        for draft_id, token_id in zip(copy.token_ids[ahead.num_known :], following, strict=False):
            if draft_id != token_id:
                break
            num_right += 1
        copy.token_ids[ahead.num_known :] = following
        copy.num_computed_tokens = min(copy.num_computed_tokens, num_right)
        copy.logits_rules = rules = sequence.logits_rules and sequence.logits_rules.copy()
        if rules is not None and rules.grammar is not None:
            # An answer must not fail because a draft model was slow.
            rules.grammar.begin_time()
        self._tables.seal(copy)
        self._tables.trim(copy)
        ahead.num_known = sequence.num_tokens
        ahead.target_length = min(sequence.num_tokens + request.num_tokens, self._max_num_tokens)
        return ahead

    def _extend_drafts(self, ahead: list[Lookahead]) -> None:
        """Compute the copies' missing tokens; then append draft tokens, one per round to each copy."""
        while ahead := [each for each in ahead if each.copy.num_tokens < each.target_length]:
            scheduled = list(self._schedule(ahead))
            if not scheduled:
                return
            logits = self._runner.forward(self._runner.prepare(scheduled))
            for copy, num_tokens in scheduled:
                copy.num_computed_tokens += num_tokens
            computed = [
                (row, copy)
                for row, (copy, _) in enumerate(scheduled)
                if copy.num_computed_tokens == copy.num_tokens
            ]
            if not computed:
                return
            rows, copies = map(list, zip(*computed, strict=True))
            index = torch.tensor(rows, device=logits.device)
            sampled = sample(logits[index], copies, self._eos_token_ids)
            # If the request's constraints allow no token after a draft token, the request is not at fault:
            # the draft token may be rejected.
            drafted = [row for row in range(len(copies)) if row not in sampled.errors]
            for row in drafted:
                copies[row].token_ids.append(sampled.token_ids[row])
            ahead = [each for each in ahead if any(each.copy is copies[row] for row in drafted)]

    def _schedule(self, ahead: list[Lookahead]) -> Iterator[ScheduledSequence]:
        """Yield the copies that have enough blocks, each with the number of its tokens to compute."""
        budget = self._max_step_tokens
        for copy in (each.copy for each in ahead):
            try:
                self._tables.reserve(copy)
            except NoFreeBlocksError:
                continue
            if num_tokens := min(copy.num_tokens - copy.num_computed_tokens, budget):
                budget -= num_tokens
                yield ScheduledSequence(copy, num_tokens)


def _blank_copy(sequence: Sequence) -> Sequence:
    """Return a copy that samples with the same random numbers, without blocks and logprobs."""
    params = replace(sequence.params, num_logprobs=None, num_prompt_logprobs=None)
    return replace(
        sequence.copy(sequence.index),
        params=params,
        adapter=None,
        block_table=[],
        num_computed_tokens=0,
        num_sealed_blocks=0,
        num_dropped_blocks=0,
        prompt_logprobs=[],
    )
