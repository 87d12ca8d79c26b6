"""A sequence: its hashes, what of it may be cached, and how far a step may go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.sequences.sequence import NO_BLOCK, Sequence, SequenceStatus, TokenLogprobs
from quire.sampling.params import SamplingParams
from tests.testing.tiny_engine import make_request

SIZE = 4
tokens = st.lists(st.integers(2, 5), min_size=1, max_size=30)


@given(tokens, st.lists(st.integers(1, 6), max_size=6))
def test_hashes_do_not_depend_on_when_they_are_computed(token_ids: list[int], parts: list[int]) -> None:
    at_once, in_parts = make_request("r", token_ids), make_request("r", token_ids[:1])
    at_once.extend_hashes(SIZE)
    for num_tokens in [*parts, len(token_ids)]:
        in_parts.token_ids += token_ids[in_parts.num_tokens :][:num_tokens]
        in_parts.extend_hashes(SIZE)
    assert in_parts.block_hashes == at_once.block_hashes
    assert len(at_once.block_hashes) == len(token_ids) // SIZE


@given(tokens, tokens)
def test_blocks_have_equal_hashes_only_after_equal_prefixes(one: list[int], two: list[int]) -> None:
    first, second = make_request("r", one), make_request("r", two)
    for each in (first, second):
        each.extend_hashes(SIZE)
    for index, hashes in enumerate(zip(first.block_hashes, second.block_hashes, strict=False)):
        end = (index + 1) * SIZE
        assert (hashes[0] == hashes[1]) == (one[:end] == two[:end])


@given(st.integers(1, 30), st.integers(0, 20), st.integers(1, 9))
def test_the_steps_of_a_sequence_with_a_budget_end_where_blocks_are_freed(
    num_prompt_tokens: int, num_output_tokens: int, budget: int
) -> None:
    """A recomputed sequence stops at its prompt's end and at each end of a block after it."""
    request = make_request("r", [5] * num_prompt_tokens, kv_budget_tokens=budget)
    request.token_ids += [6] * num_output_tokens
    ends = []
    while request.num_computed_tokens < request.num_tokens:
        request.num_computed_tokens += request.max_step_tokens(SIZE)
        ends.append(request.num_computed_tokens)
    later = range(num_prompt_tokens + 1, request.num_tokens)
    full = [end for end in later if end % SIZE == 0]
    assert ends == list(dict.fromkeys([num_prompt_tokens, *full, request.num_tokens]))


@given(st.integers(1, 30), st.lists(st.integers(1, 9), max_size=40))
def test_each_prompt_token_but_the_first_is_scored_once(num_prompt_tokens: int, steps: list[int]) -> None:
    request = make_request("r", [5] * num_prompt_tokens, num_prompt_logprobs=0)
    request.token_ids += [6] * 5
    scored: list[int] = []
    for step, wanted in enumerate([*steps, 100]):
        if step == 3:  # it is preempted, and finds no more in the cache than it may use
            request.num_computed_tokens = request.max_cached_tokens // 2
        num_tokens = min(wanted, request.num_tokens - request.num_computed_tokens)
        positions = request.positions_to_score(num_tokens)
        scored += positions
        request.prompt_logprobs += [TokenLogprobs(0.0, [])] * len(positions)
        request.num_computed_tokens += num_tokens
    assert scored == list(range(num_prompt_tokens - 1))


def test_a_prompt_that_is_scored_uses_no_cached_token_without_its_logprob() -> None:
    request = make_request("r", [5] * 10, num_prompt_logprobs=0)
    assert request.max_cached_tokens == 0
    request.prompt_logprobs = [TokenLogprobs(0.0, [])] * 4
    assert request.max_cached_tokens == 4
    request.prompt_logprobs = [TokenLogprobs(0.0, [])] * 9
    assert request.max_cached_tokens == 10


def test_with_a_budget_only_the_prompt_is_exact_and_its_last_token_is_computed() -> None:
    request = make_request("r", [5] * 10, kv_budget_tokens=8)
    request.token_ids += [6] * 5
    assert (request.num_exact_tokens, request.max_cached_tokens) == (10, 9)
    assert make_request("r", [5] * 10).max_cached_tokens == 10


def test_a_copy_shares_no_list_that_either_changes() -> None:
    request = make_request("r", [5] * 6, presence_penalty=1.0, seed=2**64 - 1)
    request.block_table, request.draft_token_ids = [3, NO_BLOCK], [8]
    request.extend_hashes(SIZE)
    copy = request.copy(index=1)
    copy.token_ids.append(9)
    copy.block_table.append(4)
    copy.block_hashes.clear()
    assert (request.num_tokens, request.block_table, len(request.block_hashes)) == (6, [3, NO_BLOCK], 1)
    assert copy.draft_token_ids == []  # they were proposed to the other sequence
    assert copy.logits_rules is not request.logits_rules
    assert (request.seed, copy.seed) == (2**64 - 1, 0)


def test_blocks_that_were_freed_are_not_held() -> None:
    sequence = Sequence("r", [5] * 12, 12, SamplingParams(), b"", block_table=[NO_BLOCK, 7, 3])
    sequence.num_dropped_blocks = 1
    assert sequence.held_blocks == [7, 3]


def test_every_state_from_stopped_on_is_final() -> None:
    final = [status.name for status in SequenceStatus if status.is_finished]
    assert final == [status.name for status in SequenceStatus if status.name.startswith("FINISHED_")]
