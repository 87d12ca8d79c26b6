"""The demo model answers with 8-bit KV caches and with quantized weights."""

from __future__ import annotations

from typing import Literal

import pytest

from quire.llm import LLM, SamplingParams
from quire.models.notes import held_out

GREEDY = SamplingParams(temperature=0, max_tokens=16)
EXAMPLES = held_out(40, 20)


def answers(llm: LLM) -> list[str]:
    chats = [list(example.messages) for example in EXAMPLES]
    return [output.outputs[0].text for output in llm.chat(chats, GREEDY, use_tqdm=False)]


def num_right(texts: list[str]) -> int:
    return sum(text == example.expected for text, example in zip(texts, EXAMPLES, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_the_demo_model_still_answers(kv_cache_dtype: Literal["fp8", "int8"]) -> None:
    with LLM(kv_cache_dtype=kv_cache_dtype, num_blocks=1024) as llm:
        at_once = answers(llm)
        cached = answers(llm)
    with LLM(kv_cache_dtype=kv_cache_dtype, num_blocks=48, max_num_batched_tokens=24, max_num_seqs=4) as llm:
        in_pieces = answers(llm)
    assert in_pieces == cached == at_once
    assert num_right(at_once) >= len(EXAMPLES) - 2


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", ["w8a8", "w4a8", "int8", "int4"])
def test_it_answers_with_quantized_weights(weight_dtype: Literal["w8a8", "w4a8", "int8", "int4"]) -> None:
    with LLM(dtype="float32", weight_dtype=weight_dtype, num_blocks=1024) as llm:
        assert num_right(answers(llm)) >= len(EXAMPLES) - 2


@pytest.mark.slow
def test_half_the_bytes_and_the_scales() -> None:
    with LLM(num_blocks=2) as plain, LLM(num_blocks=2, kv_cache_dtype="int8") as small:
        shapes = [llm.engine.memory.shape for llm in (plain, small)]
    assert shapes[1].block_bytes < 0.53 * shapes[0].block_bytes


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_dtype must be one of auto, w8a8, w4a8, int8, int4"):
        LLM(weight_dtype="int2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8, int8"):
        LLM(kv_cache_dtype="int4")  # type: ignore[arg-type]
