"""What tests of ranks have in common: the sizes of a model that ranks can divide, and its exact answers."""

from __future__ import annotations

from typing import Any

from quire.llm import LLM, SamplingParams

SIZES: dict[str, Any] = {
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150, 77)]
_PARAMS = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)


def answers(llm: LLM) -> list[Any]:
    """Return all tokens, and the exact logprobs of the best ones."""
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs)
        for output in llm.generate(PROMPTS, _PARAMS, use_tqdm=False)
    ]
