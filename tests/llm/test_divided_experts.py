"""Experts divided among ranks: the bits of one process, transformers' tokens, and a part of the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.engine.model.layers.experts import PackedExperts
from quire.llm import LLM, SamplingParams
from quire.settings.setting import SettingError
from tests.testing.tiny_models import best_tokens, load_reference

pytestmark = pytest.mark.slow

SIZES = {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150)]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
CASES: list[tuple[str, dict[str, Any], str, int, int]] = [
    # Ranks have 1, 1 and 3 of the experts.
    ("mixtral", SIZES, "float32", 3, 5),
    ("qwen3_moe", SIZES, "bfloat16", 2, 8),
    ("qwen2_moe", {**SIZES, "shared_expert_intermediate_size": 128}, "float32", 2, 8),
    ("deepseek_v3", {"moe_intermediate_size": 64, "intermediate_size": 256}, "float32", 2, 8),
    ("gpt_oss", {}, "float32", 2, 4),
]
"""Architectures, sizes, dtypes, numbers of ranks and of experts."""


def start(folder: Path, num_ranks: int, dtype: Any = "float32") -> LLM:
    return LLM(str(folder), dtype=dtype, num_blocks=128, threads=1, tensor_parallel_size=num_ranks)


def answers(llm: LLM) -> list[Any]:
    """Return all tokens, and the exact logprobs of the best ones."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def packed_experts(llm: LLM) -> list[PackedExperts]:
    modules = llm.engine.model.module.modules()
    return [module.packed for module in modules if isinstance(getattr(module, "packed", None), PackedExperts)]


def num_bytes(experts: list[PackedExperts]) -> int:
    groups = [group for each in experts for group in (each.up, each.down)]
    return sum(weight.panels.nbytes for group in groups for weight in group.weights)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("architecture", "sizes", "dtype", "num_ranks", "num_experts"), CASES)
def test_ranks_give_the_bits_of_one_process(
    tiny_model: Callable[..., Path],
    architecture: str,
    sizes: dict[str, Any],
    dtype: str,
    num_ranks: int,
    num_experts: int,
) -> None:
    """Workers with different numbers of ranks exchange blocks, so they describe these alike."""
    folder = tiny_model(architecture, **sizes)
    with start(folder, 1, dtype) as llm:
        expected = answers(llm)
        described = llm.engine.model.digest, llm.engine.memory.shape, llm.engine.model.arithmetic
        whole_bytes = num_bytes(packed_experts(llm))
    with start(folder, num_ranks, dtype) as llm:
        model = llm.engine.model
        assert (model.digest, llm.engine.memory.shape, model.arithmetic) == described
        assert answers(llm) == expected
        own = packed_experts(llm)
        num_own = len(own[0].up.weights)
        assert 0 < num_own <= num_experts // num_ranks
        assert num_bytes(own) == whole_bytes * num_own // num_experts
    if dtype == "float32":
        reference = load_reference(folder)
        for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True):
            assert best_tokens(reference, prompt, tokens) == tokens


def test_more_ranks_than_groups_of_experts_are_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(SettingError, match=r"mlp\.experts: its 5 experts form only 4 groups for ranks"):
        start(tiny_model("mixtral", **SIZES), 5)


def test_chunked_attention_is_not_divided(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(SettingError, match="among 2 processes: it has layers that attend within chunks"):
        start(tiny_model("llama4"), 2)
