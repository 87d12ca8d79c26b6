"""Output tokens per second of the engine and of transformers, same model, same requests, same threads.

    python -m quire.benchmarks.engine_against_transformers --model models/demo
    python -m quire.benchmarks.engine_against_transformers --model random-100m --output-len 32

``quire`` is the bare engine, ``quire.LLM`` adds text and answers; ``generate`` runs one static batch, padded
on the left; ``generate_batch`` is transformers' own continuous batching. The ceiling of all is the
forward pass: the share of it in an engine step is shown. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import load_model
from quire.kvindex.block_hash import block_hash
from quire.llm import LLM
from quire.llm import SamplingParams as LLMSamplingParams
from quire.models.random_model import byte_tokenizer
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
PHASES = ("schedule", "prepare", "forward", "sample", "process")


def make_prompts(num: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts of lengths from half of ``length`` to ``length``."""
    random = Random(seed)
    return [random.choices(range(10, vocab_size), k=random.randint(length // 2, length)) for _ in range(num)]


def run_engine(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, float]:
    """Generate with the engine; return the median seconds of each phase of the steps with a full batch."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(Sequence(str(index), list(prompt), len(prompt), params, b""))
    steps: dict[str, list[float]] = {phase: [] for phase in PHASES}
    while not engine.is_idle:
        updates = engine.step()
        if len(updates) == len(prompts) and all(update.tokens for update in updates):
            for phase in PHASES:
                steps[phase].append(getattr(engine.step_seconds, phase))
    return {phase: sorted(seconds)[len(seconds) // 2] for phase, seconds in steps.items() if seconds}


def run_llm(llm: LLM, prompts: list[list[int]], max_tokens: int) -> None:
    """Generate with the interface for scripts."""
    params = LLMSamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    assert len(llm.generate(prompts, params, use_tqdm=False)) == len(prompts)


def run_generate(model: Any, prompts: list[list[int]], max_tokens: int) -> None:
    """Generate with one static batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        min_new_tokens=max_tokens,
        max_new_tokens=max_tokens,
        eos_token_id=None,
    )


def run_generate_batch(model: Any, prompts: list[list[int]], max_tokens: int) -> None:
    """Generate with transformers' continuous batching."""
    config = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=1024, max_batch_tokens=512),
        progress_bar=False,
    )
    assert len(outputs) == len(prompts)


def make_100m_model(folder: str) -> str:
    """Save a random Llama of about 100 million parameters; return the folder."""
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=14,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def timed(
    run: Callable[[list[list[int]]], Any], prompts: list[list[int]], warm_up: list[list[int]]
) -> tuple[float, Any]:
    """Return the seconds and the result of a run over the prompts, after a warm-up run over other prompts."""
    run(warm_up)
    start = time.perf_counter()
    result = run(prompts)
    return time.perf_counter() - start, result


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with TemporaryDirectory() as folder:
        path = make_100m_model(folder) if arguments.model == "random-100m" else arguments.model
        seconds, phases = measure(path, arguments)
    report(arguments, seconds, phases)


def measure(path: str, arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Run all; return the seconds of each and those of the phases of an engine step."""
    loaded = load_model(path, arguments.dtype, torch.device("cpu"))
    prompts = make_prompts(arguments.num_requests, arguments.input_len, loaded.vocab_size)
    warm_up = make_prompts(2, arguments.input_len, loaded.vocab_size, seed=1)
    memory = KvMemory(loaded.kv_shape(BLOCK_SIZE), NUM_BLOCKS, torch.device("cpu"))
    limits = SchedulerConfig(BLOCK_SIZE, arguments.num_requests, 512)

    def fresh_engine_run(prompts: list[list[int]]) -> dict[str, float]:
        return run_engine(Engine(loaded, memory, limits, block_hash), prompts, arguments.output_len)

    seconds: dict[str, float] = {}
    seconds["quire"], phases = timed(fresh_engine_run, prompts, warm_up)
    with LLM(path, dtype=arguments.dtype, num_blocks=NUM_BLOCKS, max_num_seqs=arguments.num_requests) as llm:
        call = partial(run_llm, llm, max_tokens=arguments.output_len)
        seconds["quire.LLM"], _ = timed(call, prompts, warm_up)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=loaded.dtype, attn_implementation="sdpa").eval()
    for name, run in (("generate", run_generate), ("generate_batch", run_generate_batch)):
        seconds[name], _ = timed(partial(run, model, max_tokens=arguments.output_len), prompts, warm_up)
    return seconds, phases


def report(arguments: argparse.Namespace, seconds: dict[str, float], phases: dict[str, float]) -> None:
    """Print the tables and the line of JSON."""
    num_tokens = arguments.num_requests * arguments.output_len
    table = Table("", "output tok/s", "quire is faster by", title=f"{arguments.model}, {arguments.dtype}")
    for name, value in seconds.items():
        table.add_row(name, f"{num_tokens / value:.0f}", f"{value / seconds['quire']:.2f}x")
    steps = Table("phase of a step", "ms", title=f"{arguments.num_requests} running sequences")
    for phase, value in phases.items():
        steps.add_row(phase, f"{value * 1e3:.3f}")
    console = Console()
    console.print(table, steps)
    rates = {name: num_tokens / value for name, value in seconds.items()}
    print(
        json.dumps(
            {"bench": "engine_against_transformers", **vars(arguments), "tok_s": rates, "phases": phases}
        )
    )


if __name__ == "__main__":
    main()
