"""Compare the bits of one and of several ranks for each architecture, with tiny random models.

    python -m quire.benchmarks.rank_survey
    python -m quire.benchmarks.rank_survey --ranks 2,3,4 llama mixtral

Each model answers the same prompts on one process and on each number of ranks. Tokens and logprobs must be
equal to the last bit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.benchmarks.model_survey import SIZES, make_tiny_model
from quire.engine.model.check import UnsupportedModelError
from quire.llm import LLM, SamplingParams
from quire.models.random_model import byte_tokenizer
from quire.settings.setting import SettingError

RANK_SIZES = {
    **SIZES,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
"""Sizes that four ranks can divide."""
PROMPTS = [list(range(5, 5 + length)) for length in (3, 40, 150)]
PARAMS = SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True, logprobs=3)


def answers(folder: Path, num_ranks: int) -> list[Any]:
    """Return all tokens, and the exact logprobs of the best ones.

    Raises:
        UnsupportedModelError: ranks do not divide the model, or the architecture cannot be served.
    """
    with LLM(
        str(folder),
        dtype="float32",
        num_blocks=64,
        threads=1,
        tensor_parallel_size=num_ranks,
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def result_of(name: str, sizes: Sequence[int]) -> str:
    """Return what came of one architecture."""
    try:
        model = make_tiny_model(name, RANK_SIZES)
    except Exception as error:  # whatever the architecture's own code has against the sizes
        return f"not tried: {_first_line(error)}"
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        try:
            expected = answers(Path(folder), 1)
        except UnsupportedModelError as error:
            return f"not served: {_first_line(error)}"
        for size in sizes:
            try:
                found = answers(Path(folder), size)
            except (UnsupportedModelError, SettingError) as error:
                return f"refused: {_first_line(error)}"
            if found != expected:
                return f"OTHER BITS on {size} ranks"
    return "same bits"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def main() -> None:
    """Print a line for each architecture, and the counts."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.rank_survey", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="architectures; all if none is named")
    parser.add_argument("--ranks", default="2,4")
    options = parser.parse_args()
    sizes = [int(each) for each in options.ranks.split(",")]
    logging.disable(logging.WARNING)
    results: dict[str, list[str]] = {}
    for name in options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        result = result_of(name, sizes)
        print(f"{name:28} {result}", flush=True)
        results.setdefault(result.partition(":")[0], []).append(name)
    print(json.dumps({"benchmark": "rank_survey", "ranks": sizes, "architectures": results}))


if __name__ == "__main__":
    main()
