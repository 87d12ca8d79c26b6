"""On the CPU a token's logits have the same bits however its sequence was cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch

from quire.engine.model.arithmetic import SUMS
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.sequences.sequence import Sequence, TokenLogprobs
from quire.engine.weights import loader, whole_model
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kernels.cpu.products.packed_weight import TiledWeight
from tests.testing.tiny_engine import make_engine, make_request, updates_of

NUM_PROMPT, NUM_NEW = 90, 40
EXPERTS = ["gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]
ARCHITECTURES = [
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt_neox",
    "opt",
    "gpt2",
    "lfm2",
    "lfm3",
    "llama4",
    "kimi_linear",
    "minimax",
    "mamba",
    "jamba",
    *EXPERTS,
]


class Logprobs(NamedTuple):
    """The logprobs of a sequence's prompt, from its second token on, and those of its new tokens."""

    prompt: list[TokenLogprobs]
    output: list[TokenLogprobs | None]


def run(model: LoadedModel, sequence: Sequence, budget: int, num_others: int = 0) -> Logprobs:
    """Compute a sequence together with ``num_others`` other requests."""
    engine = make_engine(model, num_blocks=256, max_num_seqs=16, max_num_batched_tokens=budget)
    for index in range(num_others):
        prompt = Random(index).choices(range(2, 320), k=7 + index)
        engine.add_request(make_request(f"other-{index}", prompt))
    output: list[TokenLogprobs | None] = []
    for update in updates_of(engine, sequence):
        if update.sequence is sequence:
            output += [token.logprobs for token in update.tokens]
    return Logprobs(sequence.prompt_logprobs, output)


@pytest.fixture
def amx_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of bfloat16 be loaded with the order of sums of AMX."""
    for module in (loader, whole_model):
        monkeypatch.setattr(module, "choose_sums", lambda *_: SUMS[0])


@pytest.mark.usefixtures("amx_order")
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "gpt_neox", "mixtral", "deepseek_v3"])
def test_logprobs_in_the_order_of_amx_do_not_depend_on_how_a_sequence_is_cut(
    tiny_model: Callable[[str], Path], architecture: str
) -> None:
    model = load_model(str(tiny_model(architecture)), "bfloat16", torch.device("cpu"))
    packed = [each.packed for each in model.module.modules() if isinstance(each, PackedLinear)]
    assert packed
    assert all(isinstance(each, TiledWeight) for each in packed)
    check_cuts(model)


@pytest.mark.parametrize(
    ("architecture", "dtype", "weight_dtype"),
    [
        *((each, "bfloat16", "auto") for each in ARCHITECTURES),
        *(
            (each, "float32", "auto")
            for each in (
                "llama",
                "llama4",
                "mistral",
                "deepseek_v2",
                "mixtral",
                "minicpm3",
                "deepseek_v3",
                "phimoe",
            )
        ),
        *(("llama", "float32", each) for each in ("w8a8", "w4a8", "int8", "int4")),
        *(("gpt_oss", "float32", each) for each in ("w8a8", "int8", "int4")),
        *(("deepseek_v3", "float32", each) for each in ("w8a8", "int8")),
    ],
)
def test_logprobs_do_not_depend_on_how_a_sequence_is_cut(
    tiny_model: Callable[[str], Path], architecture: str, dtype: str, weight_dtype: str
) -> None:
    check_cuts(load_model(str(tiny_model(architecture)), dtype, torch.device("cpu"), weight_dtype))


def check_cuts(model: LoadedModel) -> None:
    """Check that the logprobs of a decoded answer are those of a prompt that ends with it."""
    prompt = Random(1).choices(range(2, 320), k=NUM_PROMPT)
    sequence = make_request("sampled", prompt, temperature=1.0, seed=1, max_tokens=NUM_NEW, num_logprobs=2)
    decoded = run(model, sequence, budget=512).output
    tokens = sequence.token_ids
    for budget, num_others in ((512, 0), (16, 0), (37, 9)):
        again = make_request("scored", tokens, temperature=0.0, max_tokens=1, num_prompt_logprobs=2)
        prefilled = run(model, again, budget, num_others).prompt[NUM_PROMPT - 1 : len(tokens) - 1]
        assert prefilled == decoded, (budget, num_others)
