"""What becomes of a step's logits: computed tokens, samples, accepted drafts, beams and failures."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.engine.errors import NoTokenLeftError
from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.request_checks import RequestChecks
from quire.engine.scheduling.requests import Requests
from quire.engine.scheduling.step_results import StepResults
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.paged_eviction import PagedEviction
from quire.engine.sequences.sequence import ScheduledSequence, Sequence, SequenceStatus, SequenceUpdate
from quire.engine.sequences.stop_rules import StopRules
from quire.engine.speculation.speculator import Speculator
from quire.sampling.params import BeamParams
from tests.testing.tiny_engine import make_request

BLOCK_SIZE, VOCAB_SIZE, EOS = 4, 16, 1


class Step:
    """The results of steps over a pool of 16 blocks, whose logits a test chooses."""

    def __init__(self) -> None:
        self.pool = BlockPool(16)
        self.tables = BlockTables(self.pool, BLOCK_SIZE)
        self.queues = GroupQueues(self.pool)
        rules = StopRules(frozenset({EOS}), max_model_len=100)
        checks = RequestChecks(False, self.tables, max_num_seqs=8, max_model_len=100)
        self.requests = Requests(checks, rules, self.queues, self.tables, SwapSpace(0), clock=lambda: 0.0)
        no_drafts: Any = SimpleNamespace(propose=lambda requests: [[] for _ in requests])
        self.speculator = Speculator(no_drafts, 4)
        no_memory: Any = None
        eviction = PagedEviction(no_memory)
        self.results = StepResults(
            self.requests, self.tables, eviction, rules, self.speculator.record_verification
        )

    def start(self, name: str, num_tokens: int = 6, is_handed_over: bool = False, **params: Any) -> Sequence:
        """Return a request that runs and whose prompt has its blocks."""
        values = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": False, **params}
        request = make_request(name, list(range(2, 2 + num_tokens)), **values)
        request.stops_after_prefill = is_handed_over
        request.samples_tokens = not is_handed_over
        group = self.requests.register(request)
        self.requests.queue_group(group)
        self.tables.reserve(request)
        self.queues.start_group(group)
        return request

    def process(
        self,
        scheduled: list[ScheduledSequence],
        logits: torch.Tensor,
        prompt_logits: torch.Tensor | None = None,
    ) -> dict[tuple[str, int], SequenceUpdate]:
        """Process a step as the engine does; return the update of each sequence."""
        results = self.results
        updates = results.record_computed_tokens(scheduled, prompt_logits)
        sampled = results.sample(logits)
        updates += results.advance_beam_searches(scheduled, logits)
        updates += results.end_sampled(sampled)
        updates = results.end_failed_requests(updates)
        return {(each.sequence.attempt_id, each.sequence.index): each for each in updates}


@pytest.fixture
def step() -> Step:
    return Step()


def most_probable(*tokens: int) -> torch.Tensor:
    """Return rows of logits ``[num_tokens, vocab_size]`` in which these tokens are the most probable."""
    return 9 * torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB_SIZE).float()


def tokens_of(update: SequenceUpdate) -> list[int]:
    return [token.token_id for token in update.tokens]


def test_a_chunk_of_a_prompt_samples_nothing_and_seals_its_full_blocks(step: Step) -> None:
    request = step.start("r", num_tokens=10)
    [update] = step.process([ScheduledSequence(request, 9)], most_probable(5)).values()
    assert (update.num_computed_tokens, update.tokens) == (9, [])
    assert request.num_sealed_blocks == 2
    [update] = step.process([ScheduledSequence(request, 1)], most_probable(5)).values()
    assert (update.num_computed_tokens, tokens_of(update)) == (10, [5])
    assert update.status == SequenceStatus.DECODING


def test_a_prompt_gives_the_first_token_of_every_sample(step: Step) -> None:
    request, other = step.start("samples", n=3), step.start("other", num_tokens=3)
    scheduled = [ScheduledSequence(request, 6), ScheduledSequence(other, 3)]
    updates = step.process(scheduled, most_probable(5, 7))
    assert [tokens_of(updates["samples", index]) for index in range(3)] == [[5]] * 3
    assert tokens_of(updates["other", 0]) == [7]
    assert [step.pool.ref_cnt(block_id) for block_id in request.block_table] == [3, 3]


def test_a_prompt_whose_tokens_are_sampled_elsewhere_is_handed_over_without_one(step: Step) -> None:
    request = step.start("r", is_handed_over=True)
    [update] = step.process([ScheduledSequence(request, 6)], most_probable(5)).values()
    assert (update.tokens, update.status) == ([], SequenceStatus.FINISHED_HANDED_OVER)
    assert step.pool.counts.used == 2


@pytest.mark.parametrize(
    ("most_probable_tokens", "sampled", "num_accepted"),
    [
        ((5, 6, 7, 8), [5, 6, 7, 8], 3),  # all drafts were right, and there is one more token
        ((5, 9, 7, 8), [5, 9], 1),  # the token after the first wrong draft has no valid logits
        ((9, 6, 7, 8), [9], 0),
        ((5, EOS, 7, 8), [5, EOS], 1),
    ],
)
def test_draft_tokens_are_accepted_up_to_the_first_wrong_one(
    step: Step, most_probable_tokens: tuple[int, ...], sampled: list[int], num_accepted: int
) -> None:
    request = step.start("r", num_tokens=6)
    request.num_computed_tokens = 5
    request.draft_token_ids = [5, 6, 7]
    step.tables.append(request, 4)
    assert len(request.block_table) == 3
    [update] = step.process([ScheduledSequence(request, 4)], most_probable(*most_probable_tokens)).values()
    assert (tokens_of(update), update.num_accepted_tokens) == (sampled, num_accepted)
    assert step.speculator.counts == (3, num_accepted)
    assert request.draft_token_ids == []
    if update.status.is_finished:
        assert step.pool.counts.used == 0
    else:
        # The last token is not computed; blocks with nothing but rejected drafts are free.
        assert request.num_computed_tokens == request.num_tokens - 1
        assert len(request.block_table) == -(-request.num_computed_tokens // BLOCK_SIZE)


def test_a_failure_after_a_right_draft_token_waits_for_the_next_step(step: Step) -> None:
    # The right token may complete a stop string, and the request ends before the next step.
    request = step.start("r", num_tokens=6, allowed_token_ids=frozenset({5}), bad_words=((5, 5),))
    request.num_computed_tokens = 5
    request.draft_token_ids = [5, 6, 7]
    step.tables.append(request, 4)
    [update] = step.process([ScheduledSequence(request, 4)], most_probable(5, 6, 7, 8)).values()
    assert (tokens_of(update), update.num_accepted_tokens, update.error) == ([5], 0, None)
    assert update.status == SequenceStatus.DECODING
    assert request.num_computed_tokens == request.num_tokens - 1
    [failed] = step.process([ScheduledSequence(request, 1)], most_probable(5)).values()
    assert isinstance(failed.error, NoTokenLeftError)
    assert step.pool.counts.used == 0


def test_beams_wait_until_all_of_them_are_computed(step: Step) -> None:
    request = step.start("beams", beam=BeamParams(2), max_tokens=2)
    [extended] = step.process([ScheduledSequence(request, 6)], most_probable(5)).values()
    assert (extended.status, extended.tokens) == (SequenceStatus.DECODING, [])
    assert request.tally.num_generated_tokens == 2
    first, second = step.requests.groups["beams"].sequences
    for beam in (first, second):
        step.tables.append(beam, 1)
    assert step.process([ScheduledSequence(first, 1)], most_probable(7)) == {}
    assert step.requests.groups["beams"].sequences == [first, second]
    first.num_computed_tokens -= 1
    scheduled = [ScheduledSequence(first, 1), ScheduledSequence(second, 1)]
    updates = step.process(scheduled, most_probable(7, 7))
    assert [update.status for update in updates.values()] == [SequenceStatus.FINISHED_LENGTH] * 2
    assert request.tally.num_generated_tokens == 4
    assert not step.requests.groups
    assert step.pool.counts.used == 0


def test_a_request_whose_logits_are_not_finite_fails_with_one_update(step: Step) -> None:
    bad, good = step.start("bad", n=2), step.start("good")
    logits = most_probable(5, 7)
    logits[0, 3] = math.nan
    updates = step.process([ScheduledSequence(bad, 6), ScheduledSequence(good, 6)], logits)
    assert "not finite" in str(updates["bad", 0].error)
    assert updates["bad", 0].status == SequenceStatus.FINISHED_FAILED
    assert set(updates) == {("bad", 0), ("good", 0)}
    assert list(step.requests.groups) == ["good"]
    assert step.pool.counts.used == len(good.block_table)
    # The failure is forgotten with its step.
    again = step.start("bad")
    [update] = step.process([ScheduledSequence(again, 6)], most_probable(5)).values()
    assert update.error is None


def test_a_prompt_that_cannot_be_scored_fails_before_it_samples(step: Step) -> None:
    request = step.start("r", num_prompt_logprobs=1)
    prompt_logits = torch.full((5, VOCAB_SIZE), math.inf)
    [update] = step.process([ScheduledSequence(request, 6)], most_probable(5), prompt_logits).values()
    assert "not finite" in str(update.error)
    assert update.tokens == []
    assert request.num_output_tokens == 0
    assert step.pool.counts.used == 0
