"""The tensors that a batch of decodes writes anew each step, against tensors built from scratch."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from quire.engine.runner.decode_batch import DecodeBatch
from quire.engine.runner.step_tables import StepTables
from quire.engine.sequences.sequence import ScheduledSequence, Sequence
from quire.sampling.params import SamplingParams

BLOCK_SIZE, NUM_STEPS = 4, 40


def make_sequence(random: Random, length: int) -> Sequence:
    """Return a sequence whose last token is to be computed."""
    tokens = random.choices(range(100), k=length)
    sequence = Sequence(str(length), tokens, length, SamplingParams(), b"root")
    sequence.num_computed_tokens = length - 1
    return sequence


def test_each_step_has_the_next_token_of_every_sequence() -> None:
    random = Random(0)
    sequences = [make_sequence(random, length) for length in (1, 4, 5, 30)]
    scheduled = [ScheduledSequence(each, 1) for each in sequences]
    batch = DecodeBatch(scheduled, StepTables(BLOCK_SIZE, 1), BLOCK_SIZE)
    for _ in range(NUM_STEPS):
        for each in sequences:
            while len(each.block_table) * BLOCK_SIZE < each.num_tokens:
                each.block_table.append(random.randrange(1000))
        step = batch.next_step()
        assert step.input_ids.tolist() == [each.token_ids[-1] for each in sequences]
        assert step.positions.tolist() == [each.num_tokens - 1 for each in sequences]
        assert step.logit_rows.tolist() == list(range(len(sequences)))
        metadata = step.metadata
        assert metadata.query_starts.tolist() == list(range(len(sequences) + 1))
        assert metadata.seq_lens.tolist() == [each.num_tokens for each in sequences]
        for row, each in enumerate(sequences):
            table = metadata.block_tables[row].tolist()
            assert table[: len(each.block_table)] == each.block_table
            block, offset = divmod(int(metadata.slot_mapping[row]), BLOCK_SIZE)
            position = each.num_tokens - 1
            assert (block, offset) == (each.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
        for each in sequences:
            each.num_computed_tokens += 1
            each.token_ids.append(random.randrange(100))


def test_only_the_same_sequences_with_one_token_each_are_the_same_batch() -> None:
    random = Random(0)
    first, second = make_sequence(random, 3), make_sequence(random, 3)
    scheduled = [ScheduledSequence(first, 1), ScheduledSequence(second, 1)]
    batch = DecodeBatch(scheduled, StepTables(BLOCK_SIZE, 1), BLOCK_SIZE)
    assert batch.has([ScheduledSequence(first, 1), ScheduledSequence(second, 1)])
    assert not batch.has(scheduled[::-1])
    assert not batch.has(scheduled[:1])
    assert not batch.has([scheduled[0], ScheduledSequence(second, 2)])


def test_prompts_and_scored_prompts_do_not_fit() -> None:
    random = Random(0)
    sequence = make_sequence(random, 3)
    assert DecodeBatch.fits([ScheduledSequence(sequence, 1)])
    assert not DecodeBatch.fits([ScheduledSequence(sequence, 2)])
    scored = replace(sequence, params=SamplingParams(num_prompt_logprobs=1))
    assert not DecodeBatch.fits([ScheduledSequence(sequence, 1), ScheduledSequence(scored, 1)])
