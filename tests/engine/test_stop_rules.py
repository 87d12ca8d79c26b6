"""When a sequence ends, and in which state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.engine.sequences.stop_rules import StopRules
from quire.sampling.params import SamplingParams

EOS, STOP, OTHER, MAX_MODEL_LEN = 1, 7, 9, 20
RULES = StopRules(frozenset({EOS}), MAX_MODEL_LEN)


def make_sequence(output: list[int], num_prompt_tokens: int = 3, **params: Any) -> Sequence:
    prompt = [5] * num_prompt_tokens
    sampling = SamplingParams(**{"max_tokens": 10, "stop_token_ids": frozenset({STOP}), **params})
    return Sequence("r", prompt + output, num_prompt_tokens, sampling, b"")


@pytest.mark.parametrize(
    ("output", "params", "status"),
    [
        ([OTHER], {}, SequenceStatus.DECODING),
        ([STOP, OTHER], {}, SequenceStatus.DECODING),  # only the new token counts
        ([EOS], {}, SequenceStatus.FINISHED_STOPPED),
        ([STOP], {}, SequenceStatus.FINISHED_STOPPED),
        ([EOS], {"ignore_eos": True}, SequenceStatus.DECODING),
        ([STOP], {"ignore_eos": True}, SequenceStatus.FINISHED_STOPPED),
        ([EOS], {"min_tokens": 2}, SequenceStatus.DECODING),
        ([OTHER, EOS], {"min_tokens": 2}, SequenceStatus.FINISHED_STOPPED),
        ([OTHER] * 10, {}, SequenceStatus.FINISHED_LENGTH),
        ([OTHER] * 9 + [EOS], {}, SequenceStatus.FINISHED_STOPPED),  # both rules: the answer is complete
        ([OTHER] * 9 + [EOS], {"ignore_eos": True}, SequenceStatus.FINISHED_LENGTH),
    ],
)
def test_the_status_after_a_token(output: list[int], params: dict[str, Any], status: SequenceStatus) -> None:
    assert RULES.status_after_token(make_sequence(output, **params)) == status


def test_a_prefill_ends_with_its_first_token_unless_that_token_ends_the_answer() -> None:
    for token, status in (
        (OTHER, SequenceStatus.FINISHED_HANDED_OVER),
        (EOS, SequenceStatus.FINISHED_STOPPED),
    ):
        sequence = make_sequence([token])
        sequence.stops_after_prefill = True
        assert RULES.status_after_token(sequence) == status


@given(st.integers(1, MAX_MODEL_LEN - 1), st.integers(1, 2 * MAX_MODEL_LEN))
def test_an_answer_has_as_many_tokens_as_are_promised(num_prompt_tokens: int, max_tokens: int) -> None:
    sequence = make_sequence([], num_prompt_tokens, max_tokens=max_tokens)
    promised = RULES.max_output_tokens(sequence)
    status = SequenceStatus.DECODING
    while not status.is_finished:
        assert RULES.num_tokens_left(sequence) == promised - sequence.num_output_tokens > 0
        sequence.token_ids.append(OTHER)
        status = RULES.status_after_token(sequence)
    assert status == SequenceStatus.FINISHED_LENGTH
    assert sequence.num_output_tokens == promised
