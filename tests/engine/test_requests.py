"""A request leaves nothing behind, in whatever state it ends."""

from __future__ import annotations

import pytest
import torch

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.request_checks import RequestChecks
from quire.engine.scheduling.requests import Requests
from quire.engine.scheduling.sequence_group import SequenceGroup, SwappedTables
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.engine.sequences.stop_rules import StopRules
from quire.sampling.params import BeamParams
from tests.testing.tiny_engine import BLOCK_SIZE, make_prompt, make_request


class Ledger:
    """The requests, queues and blocks of an engine that computes nothing."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = BlockPool(16)
        self.tables = BlockTables(self.pool, BLOCK_SIZE)
        self.queues = GroupQueues(self.pool)
        self.swap_space = SwapSpace(4)
        checks = RequestChecks(False, self.tables, max_num_seqs=4, max_model_len=100)
        rules = StopRules(frozenset({1}), 100)
        self.requests = Requests(
            checks, rules, self.queues, self.tables, self.swap_space, clock=lambda: self.now
        )

    def run_group(self, request: Sequence) -> SequenceGroup:
        """Let a request run whose prompt has its blocks."""
        group = self.requests.register(request)
        self.requests.queue_group(group)
        self.tables.reserve(request)
        self.queues.start_group(group)
        return group

    def assert_empty(self) -> None:
        assert not self.requests.groups
        assert self.queues.is_idle
        assert not self.queues.transfers
        assert self.pool.counts.used == 0
        assert self.swap_space.num_free == 4


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_an_id_is_used_once_at_a_time(ledger: Ledger) -> None:
    group = ledger.requests.register(make_request("r", make_prompt(20)))
    with pytest.raises(ValueError, match="request r is already here"):
        ledger.requests.register(make_request("r", make_prompt(30)))
    ledger.requests.discard_group(group, SequenceStatus.FINISHED_ABORTED)
    ledger.requests.register(make_request("r", make_prompt(30)))


def test_a_request_that_is_refused_is_not_registered(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="100 prompt tokens"):
        ledger.requests.register(make_request("r", make_prompt(100)))
    ledger.assert_empty()


def test_a_beam_search_ends_at_the_most_tokens_of_the_model(ledger: Ledger) -> None:
    assert ledger.requests.register(make_request("plain", make_prompt(20))).beam is None
    request = make_request("beams", make_prompt(95), beam=BeamParams(2), max_tokens=40)
    search = ledger.requests.register(request).beam
    assert search is not None
    logprobs = torch.arange(-8.0, 0.0)[None]
    assert len(search.advance(logprobs, [[5] * 3])) == 2
    assert search.advance(logprobs.repeat(2, 1), [[5] * 4, [6] * 4]) == []
    assert search.is_done
    assert [len(tokens) for _, tokens, _ in search.hypotheses] == [5, 5]


def test_a_group_ends_with_its_last_sequence(ledger: Ledger) -> None:
    request = make_request("r", make_prompt(40), n=2)
    group = ledger.run_group(request)
    first, second = group.fork_samples(ledger.tables)[:]
    ledger.now = 3.0
    ledger.requests.finish_sequence(first, SequenceStatus.FINISHED_STOPPED)
    assert (first.finished_at, first.status) == (3.0, SequenceStatus.FINISHED_STOPPED)
    assert ledger.requests.groups == {"r": group}
    assert ledger.pool.counts.used == 3  # the other sequence still holds the shared blocks
    ledger.requests.finish_sequence(second, SequenceStatus.FINISHED_LENGTH)
    ledger.assert_empty()


def test_the_blocks_of_a_finished_prefill_stay_until_they_are_released(ledger: Ledger) -> None:
    request = make_request("r", make_prompt(40))
    request.stops_after_prefill = True
    group = ledger.run_group(request)
    ledger.requests.finish_sequence(request, SequenceStatus.FINISHED_HANDED_OVER)
    assert ledger.queues.is_idle
    assert ledger.pool.counts.used == 3
    ledger.requests.discard_group(group, SequenceStatus.FINISHED_ABORTED)
    ledger.assert_empty()


def test_a_discarded_group_gives_back_its_host_blocks(ledger: Ledger) -> None:
    group = ledger.run_group(make_request("r", make_prompt(40)))
    ledger.tables.free(group.prompt)
    group.swapped = SwappedTables(ledger.swap_space.allocate(3), [[0, 1, 2]])
    ledger.queues.suspend_group(group)
    ledger.requests.discard_group(group, SequenceStatus.FINISHED_ABORTED)
    assert group.prompt.status == SequenceStatus.FINISHED_ABORTED
    ledger.assert_empty()


def test_a_discarded_transfer_is_informed_when_its_blocks_are_free(ledger: Ledger) -> None:
    group = ledger.requests.register(make_request("r", make_prompt(40)))
    outcomes: list[bool] = []

    def on_outcome(is_granted: bool) -> None:
        ledger.assert_empty()
        outcomes.append(is_granted)

    ledger.queues.add_transfer(group, on_outcome)
    ledger.requests.discard_group(group, SequenceStatus.FINISHED_ABORTED)
    assert outcomes == [False]
