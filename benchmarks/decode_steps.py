"""The time of a decode step, by how it is launched: kernel by kernel or as a CUDA graph.

    python -m quire.benchmarks.decode_steps [--batches 1,8,64,256] [--context 1024]

The model is a random Llama of 1.2 billion parameters in bfloat16. A step reads every weight and every key and
value once: ``floor`` is the time that a device copy takes for as many bytes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.decode_graphs import Capture, CudaCapture
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import load_model
from quire.models.random_model import byte_tokenizer
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
NUM_STEPS = 48
BUDGET = 8192
"""Tokens of a step with prompts."""

ONE_BILLION: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class StepTime(NamedTuple):
    """Medians over the steps with a full batch, in seconds.

    Attributes:
        forward: the forward pass, until its logits are there.
        step: all of a step: scheduling, preparing, forward pass, sampling and processing.
    """

    forward: float
    step: float


def save_model(folder: Path, dtype: torch.dtype = torch.bfloat16, **values: Any) -> Path:
    """Save a random Llama, with a tokenizer of bytes; return the folder."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**ONE_BILLION, **values})
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def make_engine(folder: Path, device: torch.device, max_num_seqs: int, context: int) -> Engine:
    """Return an engine with room for ``max_num_seqs`` sequences of ``context`` tokens and their answers."""
    model = load_model(str(folder), "auto", device)
    blocks_per_sequence = -(-(context + NUM_STEPS + 1) // BLOCK_SIZE)
    memory = KvMemory(model.kv_shape(BLOCK_SIZE), max_num_seqs * blocks_per_sequence + 1, device)
    config = SchedulerConfig(BLOCK_SIZE, max_num_seqs, max(BUDGET, max_num_seqs))
    return Engine(model, memory, config, _hash_block, max_model_len=context + NUM_STEPS)


def _hash_block(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + str(tokens).encode()).digest()[:16]


def time_steps(engine: Engine, batch: int, context: int) -> StepTime:
    """Decode with a batch of equal contexts, nothing of them cached."""
    engine.pool.clear_cache()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
    for index in range(batch):
        prompt = Random(index).choices(range(2, engine.model.vocab_size), k=context)
        engine.add_request(Sequence(str(index), prompt, context, params, b"root"))
    times = []
    while not engine.is_idle:
        engine.step()
        if engine.num_step_tokens == engine.num_stepped == batch:
            phases = engine.step_seconds
            host = phases.schedule + phases.prepare + phases.sample + phases.process
            times.append(StepTime(phases.forward, host + phases.forward))
    return StepTime(median(each.forward for each in times), median(each.step for each in times))


def floor_seconds(engine: Engine, batch: int, context: int, bandwidth: float) -> float:
    """Return the seconds that reading a step's bytes takes at ``bandwidth`` bytes per second."""
    weights = sum(each.numel() * each.element_size() for each in engine.model.module.parameters())
    kv_bytes = engine.memory.shape.block_bytes // BLOCK_SIZE * (context + NUM_STEPS // 2) * batch
    return float(weights + kv_bytes) / bandwidth


def measure(
    engine: Engine,
    batches: list[int],
    context: int,
    bandwidth: float,
    capture: Callable[[], Capture],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to launch and each batch; print the same."""
    for way in ("eager", "graphs"):
        engine.runner = ModelRunner(engine.model, engine.memory)
        try:
            if way == "graphs":
                engine.runner.capture_decode_steps(capture(), max(batches), engine.max_model_len)
            for batch in batches:
                time_steps(engine, batch, context)  # compiles what this batch needs
                forward, step = time_steps(engine, batch, context)
                floor = floor_seconds(engine, batch, context, bandwidth)
                print(
                    f"decode step {batch:4} x {context}  {way:6} forward {forward * 1e3:8.3f} ms  "
                    f"whole {step * 1e3:8.3f} ms  floor {floor * 1e3:8.3f} ms  {batch / step:9.0f} tokens/s",
                    flush=True,
                )
                yield {
                    "batch": batch,
                    "context": context,
                    "name": way,
                    "forward_ms": round(forward * 1e3, 4),
                    "step_ms": round(step * 1e3, 4),
                    "floor_ms": round(floor * 1e3, 4),
                }
        except RuntimeError as error:
            # A failure of one way must not end the table.
            print(f"  {way} cannot: {str(error).splitlines()[0]}", file=sys.stderr)
            for attempt_id in list(engine.groups):
                engine.abort(attempt_id)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch sees none: run it on a machine with a GPU.")
    from quire.benchmarks.kernels_gpu import copy_bandwidth

    batches = [int(each) for each in arguments.batches.split(",")]
    bandwidth = copy_bandwidth()
    gc.collect()
    torch.cuda.empty_cache()
    with TemporaryDirectory() as folder:
        device = torch.device("cuda")
        engine = make_engine(save_model(Path(folder)), device, max(batches), arguments.context)
    rows = list(measure(engine, batches, arguments.context, bandwidth, CudaCapture))
    result = {"benchmark": "decode_steps", "device": torch.cuda.get_device_name(), "rows": rows}
    print(json.dumps({**result, "copy_bytes_per_second": bandwidth}))


if __name__ == "__main__":
    main()
