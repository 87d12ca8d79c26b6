"""Batches: what the rows hold, and which tokens the loss counts."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.models.source import demo_model_path
from quire.models.training.batches import TEXT_WEIGHT, VALUE_WEIGHT, Batches, Stage
from quire.models.training.tokenizer import CONTEXT, PAD
from quire.models.training.train import STAGES

STAGE = Stage(6, 9)
RECITAL = Stage(4, 32, is_recital=True)
ONE_ROW = 1


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture(scope="module")
def batches(tokenizer: Tokenizer) -> Batches:
    return Batches(tokenizer)


def test_rows_are_what_the_chat_template_writes(
    batches: Batches, tokenizer: Tokenizer, chat_tokenizer: PreTrainedTokenizerFast
) -> None:
    for seed in range(20):
        [row] = batches.draw(Random(seed), STAGE, ONE_ROW).inputs.tolist()
        written = tokenizer.decode(row, skip_special_tokens=False)
        turns = re.findall(r"<\|(system|user|assistant)\|>(.*?)(?:<\|end\|>|$)", written, re.DOTALL)
        messages = [{"role": role, "content": content} for role, content in turns]
        ids = chat_tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        # The last token of a conversation is only a target.
        assert ids[:-1] == row


@pytest.mark.parametrize("stage", [STAGE, RECITAL])
def test_targets_are_the_next_tokens(stage: Stage, batches: Batches) -> None:
    batch = batches.draw(Random(1), stage, 1000)
    num_rows, width = batch.inputs.shape
    assert num_rows > 1
    inner = batch.positions % width < width - 1
    assert torch.equal(batch.inputs.flatten()[batch.positions[inner] + 1], batch.targets[inner])


@pytest.mark.parametrize("stage", [STAGE, RECITAL])
def test_padding_is_never_predicted(stage: Stage, batches: Batches, tokenizer: Tokenizer) -> None:
    batch = batches.draw(Random(1), stage, 1000)
    assert tokenizer.token_to_id(PAD) not in batch.targets
    assert len(batch.positions) == len(batch.targets) == len(batch.weights)


def test_an_answer_has_at_most_one_value(batches: Batches) -> None:
    batch = batches.draw(Random(1), STAGE, 4096)
    num_answers = STAGE.questions * len(batch.inputs)
    assert 0.8 * num_answers < batch.is_value.sum() <= num_answers


@pytest.mark.parametrize("stage", [STAGE, RECITAL])
def test_values_stand_earlier_in_the_row(stage: Stage, batches: Batches) -> None:
    batch = batches.draw(Random(2), stage, 1000)
    width = batch.inputs.shape[1]
    values = zip(batch.positions[batch.is_value], batch.targets[batch.is_value], strict=True)
    for position, value in values:
        assert value in batch.inputs[position // width, : position % width + 1]


def test_some_of_the_text_counts_a_little(batches: Batches) -> None:
    batch = batches.draw(Random(1), STAGES[6], 4096)
    text = batch.weights == torch.tensor(TEXT_WEIGHT)
    assert 0 < text.sum() < 0.1 * batch.inputs.numel()
    assert batch.weights.max() == VALUE_WEIGHT


def test_the_seed_decides(batches: Batches) -> None:
    first, again, other = (batches.draw(Random(seed), STAGE, 1000) for seed in (1, 1, 2))
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize("stage", [stage for stage in STAGES if not stage.is_recital], ids=str)
def test_stages_know_their_length(stage: Stage, batches: Batches) -> None:
    widths = [batches.draw(Random(seed), stage, ONE_ROW).inputs.shape[1] for seed in range(20)]
    assert sum(widths) / len(widths) == pytest.approx(stage.tokens, rel=0.2)
    assert max(widths) < CONTEXT
