"""Step times of one model on one, two or more processes that share the same processors.

    python -m quire.benchmarks.tensor_parallel [--sizes 1,2] [--processors 2] [--hidden-size 1024]

The model is a random Llama of 12 layers in bfloat16. All sizes have the same number of threads together. The
decode batches have 128 tokens of context. Times are medians of forward passes; run it on a machine that has
nothing else to do. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from quire.engine.engine import Engine
from quire.engine.sequence import Sequence
from quire.llm import LLM
from quire.models.random_model import make_random_model
from quire.sampling.params import SamplingParams

BATCHES = (1, 8, 32)
CONTEXT, NUM_STEPS, PROMPT = 128, 24, 512
NUM_PROMPTS = 5


def main() -> None:
    """Print a table of milliseconds, and the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", default="1,2")
    parser.add_argument("--processors", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=1024)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        model = make_random_model("llama", Path(folder), **_shape(arguments.hidden_size))
        sizes = [int(each) for each in arguments.sizes.split(",")]
        times = {size: _measured(model, size, arguments.processors) for size in sizes}
    for size, milliseconds in times.items():
        print(f"{size} processes: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in milliseconds.items()))
    print(json.dumps(times))


def _shape(hidden_size: int) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 12,
        "num_attention_heads": hidden_size // 64,
        "num_key_value_heads": hidden_size // 128,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "vocab_size": 8192,
    }


def _measured(model: Path, size: int, num_processors: int) -> dict[str, float]:
    """Return the median milliseconds of a forward pass, by what it computes."""
    with LLM(
        str(model),
        dtype="bfloat16",
        num_blocks=1024,
        threads=num_processors,
        tensor_parallel_size=size,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=PROMPT,
    ) as llm:
        times = {f"decode {batch}": _decode(llm.engine, batch) for batch in BATCHES}
        prompts = [_steps(llm.engine, [[number + 5] * PROMPT], 1)[0] for number in range(NUM_PROMPTS)]
    times[f"prompt of {PROMPT}"] = median(prompts)
    return {name: round(1000 * seconds, 3) for name, seconds in times.items()}


def _decode(engine: Engine, batch: int) -> float:
    prompts = [[100 + row] * CONTEXT for row in range(batch)]
    return median(_steps(engine, prompts, NUM_STEPS)[-NUM_STEPS // 2 :])


def _steps(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[float]:
    """Run prompts that get some tokens each; return the seconds of each step's forward pass."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_request(Sequence(str(number), prompt, len(prompt), params, b""))
    seconds = []
    while not engine.is_idle:
        engine.step()
        seconds.append(engine.step_seconds.forward)
    engine.clear_cache()
    return seconds


if __name__ == "__main__":
    main()
