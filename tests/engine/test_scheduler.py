"""The scheduler apart from the engine: who is computed, in which chunks, and who waits."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.scheduling.fair_blocks import FairBlocks
from quire.engine.scheduling.first_blocks import FirstBlocks
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.preemption import Preemption
from quire.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.scheduling.swapping import Swapping
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams, SamplingParams
from tests.testing.tiny_engine import make_engine, make_prompt, make_request, run

BLOCK_SIZE = 4


class Bench:
    """A scheduler, and the parts that it works with."""

    def __init__(self, num_blocks: int = 32, max_num_seqs: int = 4, budget: int = 16) -> None:
        config = SchedulerConfig(BLOCK_SIZE, max_num_seqs, budget)
        self.pool = BlockPool(num_blocks)
        self.tables = BlockTables(self.pool, BLOCK_SIZE)
        self.queues = GroupQueues(self.pool)
        swapping = Swapping(self.queues, self.tables, SwapSpace(0))
        self.preemption = Preemption(self.queues, self.tables, swapping, lambda num_tokens, num_blocks: False)
        first_blocks = FirstBlocks(self.queues, self.tables, None)
        fair_blocks = FairBlocks(self.queues, self.tables)
        self.scheduler = Scheduler(
            config, self.queues, self.tables, self.preemption, first_blocks, fair_blocks
        )

    def add(self, name: str, num_tokens: int, first_token: int = 0) -> SequenceGroup:
        """Queue a prompt; prompts with different first tokens share no blocks."""
        token_ids = [(first_token + index) % 256 for index in range(num_tokens)]
        sequence = Sequence(name, token_ids, num_tokens, SamplingParams(), b"")
        group = SequenceGroup(sequence, [sequence])
        self.queues.add_waiting(group)
        return group

    def step(self) -> dict[str, int]:
        """Schedule and compute a step; return how many tokens of each request it computed."""
        schedule = self.scheduler.schedule()
        for sequence, num_tokens in schedule.sequences:
            sequence.num_computed_tokens += num_tokens - len(sequence.draft_token_ids)
            sequence.draft_token_ids = []
            self.tables.seal(sequence)
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.token_ids.append(1)
        return {each.sequence.attempt_id: each.num_scheduled_tokens for each in schedule.sequences}


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    bench = Bench()
    short = bench.add("short", 3)
    long = bench.add("long", 40, first_token=100)
    assert bench.step() == {"short": 3, "long": 13}
    assert short.prompt.status == long.prompt.status == SequenceStatus.PREFILLING
    assert bench.step() == {"short": 1, "long": 15}
    assert bench.step() == {"short": 1, "long": 12}
    assert bench.step() == {"short": 1, "long": 1}


def test_no_more_sequences_run_than_are_allowed() -> None:
    bench = Bench(max_num_seqs=2)
    for index in range(3):
        bench.add(str(index), 2, first_token=50 * index)
    assert bench.step() == {"0": 2, "1": 2}
    assert bench.step() == {"0": 1, "1": 1}
    [first, _] = bench.queues.running
    bench.queues.remove_group(first)
    assert bench.step() == {"1": 1, "2": 2}


def test_a_newer_group_does_not_pass_one_that_waits_for_blocks() -> None:
    bench = Bench(num_blocks=8, budget=64)
    bench.add("running", 16)
    assert bench.step() == {"running": 16}
    bench.add("large", 16, first_token=100)
    bench.add("small", 4, first_token=200)
    # The running group takes its fifth block, and one of the other three is kept for its growth.
    assert bench.step() == {"running": 1}
    assert [group.attempt_id for group in bench.queues.waiting] == ["large", "small"]


def test_blocks_are_taken_from_the_newest_group() -> None:
    bench = Bench(num_blocks=5, budget=64)
    old = bench.add("old", 8)
    new = bench.add("new", 7, first_token=100)
    assert bench.step() == {"old": 8, "new": 7}
    assert bench.step() == {"old": 1, "new": 1}
    for _ in range(4):
        bench.step()
    assert bench.preemption.counts == (0, 1)
    assert bench.queues.running == [old]
    assert list(bench.queues.waiting) == [new]
    assert new.prompt.status == SequenceStatus.PREEMPTED


def test_no_group_is_preempted_for_draft_tokens() -> None:
    bench = Bench(num_blocks=5, budget=64)
    old = bench.add("old", 7)
    bench.add("new", 7, first_token=100)
    assert bench.step() == {"old": 7, "new": 7}
    old.prompt.draft_token_ids = [1, 2, 3, 4, 5, 6]  # they take two more blocks, and one is free
    assert bench.step() == {"old": 1, "new": 1}
    assert bench.preemption.num_preempted == 0


def test_draft_tokens_leave_room_for_one_token_of_each_running_sequence() -> None:
    bench = Bench(max_num_seqs=3, budget=6)
    groups = [bench.add(str(index), 1, first_token=50 * index) for index in range(3)]
    bench.step()
    for group in groups:
        group.prompt.draft_token_ids = [1, 2]
    assert bench.step() == {"0": 3, "1": 2, "2": 1}


def test_beams_advance_together() -> None:
    bench = Bench(budget=4)
    group = bench.add("beams", 4)
    group.prompt.params = SamplingParams(beam=BeamParams(3))
    group.beam = BeamSearch(BeamParams(3), 8, frozenset())
    assert bench.step() == {"beams": 4}
    group.sequences += [bench.tables.fork(group.prompt, index) for index in (1, 2)]
    group.is_forked = True
    schedule = bench.scheduler.schedule()
    assert [each.num_scheduled_tokens for each in schedule.sequences] == [1, 1, 1]
    for each, _ in schedule.sequences:
        each.num_computed_tokens += 1
        each.token_ids.append(1)
    bench.scheduler.config = SchedulerConfig(BLOCK_SIZE, 2, 2)
    assert bench.scheduler.schedule().sequences == []


def test_the_second_of_two_equal_prompts_waits_for_the_first(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), max_num_batched_tokens=64)
    first, second = (make_request(name, make_prompt(200)) for name in ("first", "second"))
    run(engine, first, second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
