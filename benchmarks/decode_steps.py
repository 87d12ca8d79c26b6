"""Measures the time of a decode step, launched kernel by kernel or as a CUDA graph.

    python -m quire.benchmarks.decode_steps --batches 1,8,64,256 --context 1024

The model is a random Llama of 1.2 billion parameters in bfloat16. A step reads every weight and every key and
value once: ``floor`` is the time of a device copy of as many bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import torch

from quire.benchmarks.harness.engines import BLOCK_SIZE, make_engine
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import random_llama
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.benchmarks.kernels_gpu import copy_bandwidth, gpu_name
from quire.engine.engine import Engine
from quire.engine.model.decode_graphs import Capture, CudaCapture
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import load_model
from quire.sampling.params import SamplingParams

NUM_STEPS = 48
BUDGET = 8192
"""Most tokens of a step that computes prompts."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: Annotated[int, "tokens of each prompt"] = 1024


class StepTime(NamedTuple):
    """Medians over the steps with a full batch, in seconds.

    Attributes:
        forward: the forward pass, until its logits are computed.
        step: all of a step: scheduling, preparing, forward pass, sampling and processing.
    """

    forward: float
    step: float


def open_engine(folder: Path, device: torch.device, max_num_seqs: int, context: int) -> Engine:
    """Return an engine with room for ``max_num_seqs`` sequences of ``context`` tokens and their answers."""
    model = load_model(str(folder), "auto", device)
    num_blocks = max_num_seqs * -(-(context + NUM_STEPS + 1) // BLOCK_SIZE) + 1
    return make_engine(
        model,
        num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(BUDGET, max_num_seqs),
        max_model_len=context + NUM_STEPS,
        device=device,
    )


def time_steps(engine: Engine, batch: int, context: int) -> StepTime:
    """Decode with a batch of equal contexts without cached blocks."""
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
    batches: Items[int],
    context: int,
    bandwidth: float,
    capture: Callable[[], Capture],
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to launch and each batch."""
    for way in ("eager", "graphs"):
        engine.runner = ModelRunner(engine.model, engine.memory)
        try:
            if way == "graphs":
                engine.runner.capture_decode_steps(capture(), max(batches), engine.max_model_len)
            for batch in batches:
                time_steps(engine, batch, context)  # compiles what this batch needs
                forward, step = time_steps(engine, batch, context)
                floor = floor_seconds(engine, batch, context, bandwidth)
                show_progress(f"decode step {batch} x {context}, {way}: {step * 1e3:.3f} ms")
                yield {
                    "batch": batch,
                    "context": context,
                    "name": way,
                    "forward_ms": round(forward * 1e3, 4),
                    "step_ms": round(step * 1e3, 4),
                    "floor_ms": round(floor * 1e3, 4),
                    "tokens_per_second": round(batch / step),
                }
        except RuntimeError as error:
            # A failure of one way to launch must not end the table.
            show_progress(f"{way} cannot: {str(error).splitlines()[0]}")
            for attempt_id in list(engine.groups):
                engine.abort(attempt_id)


@program
def main(options: Options) -> Report:
    """Measure all batches, eager and in graphs."""
    device = gpu_name()
    bandwidth = copy_bandwidth()
    gc.collect()
    torch.cuda.empty_cache()
    with TemporaryDirectory() as folder:
        model = random_llama("1b", Path(folder), torch.bfloat16)
        engine = open_engine(model, torch.device("cuda"), max(options.batches), options.context)
    rows = list(measure(engine, options.batches, options.context, bandwidth, CudaCapture))
    columns = {
        "decode step": "{batch} x {context}",
        "way": "{name}",
        "forward (ms)": "{forward_ms:.3f}",
        "whole (ms)": "{step_ms:.3f}",
        "floor (ms)": "{floor_ms:.3f}",
        "tokens/s": "{tokens_per_second}",
    }
    results = {"device": device, "rows": rows, "copy_bytes_per_second": bandwidth}
    return Report([table(device, rows, columns)], results)


if __name__ == "__main__":
    main()
