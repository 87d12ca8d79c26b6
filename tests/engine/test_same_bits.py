"""On the CPU a token's logits have the same bits however its sequence was cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence
from quire.kvindex.block_hash import block_hash
from quire.sampling.params import SamplingParams

BLOCK_SIZE, NUM_PROMPT, NUM_NEW = 16, 90, 40
# Not gpt_oss: the sums of its experts depend on how many tokens of a step they get.
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "opt", "gpt2"]


def run(model: LoadedModel, sequence: Sequence, budget: int, company: int = 0) -> list[object]:
    """Return the logprobs of the prompt and of what is sampled, beside ``company`` other requests."""
    memory = KvMemory(model.kv_shape(BLOCK_SIZE), 256, torch.device("cpu"))
    limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs=16, max_num_batched_tokens=budget)
    engine = Engine(model, memory, limits, block_hash)
    params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
    for place in range(company):
        prompt = Random(place).choices(range(2, 320), k=7 + place)
        engine.add_request(Sequence(f"other-{place}", prompt, len(prompt), params, b"other"))
    engine.add_request(sequence)
    drawn = []
    while not engine.is_idle:
        for update in engine.step():
            if update.sequence is sequence:
                drawn += update.tokens
    return [*sequence.prompt_logprobs, *drawn]


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((each, "bfloat16") for each in ARCHITECTURES), ("llama", "float32"), ("mistral", "float32")],
)
def test_logprobs_do_not_depend_on_how_a_sequence_is_cut(
    tiny_model: Callable[[str], Path], architecture: str, dtype: str
) -> None:
    model = load_model(str(tiny_model(architecture)), dtype, torch.device("cpu"))
    prompt = Random(1).choices(range(2, 320), k=NUM_PROMPT)
    sampled = SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_NEW, ignore_eos=True, num_logprobs=2)
    sequence = Sequence("drawn", list(prompt), NUM_PROMPT, sampled, b"root")
    decoded = [logprobs for _, logprobs in run(model, sequence, budget=512)]  # type: ignore[misc]
    tokens = sequence.token_ids

    scored = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=2)
    for budget, company in ((512, 0), (16, 0), (37, 9)):
        again = Sequence("scored", list(tokens), len(tokens), scored, b"root")
        prefilled = run(model, again, budget, company)[NUM_PROMPT - 1 : len(tokens) - 1]
        assert prefilled == decoded, (budget, company)
