"""The CPU time that a step takes around the model and the sampler, for batches that decode.

    python -m quire.benchmarks.step_overhead [--batches 1x50,64x100,256x512,16x131072] [--steps 200]
        [--waiting 0]

The engine is a real one, with prepared tensors, but its model computes nothing and always prefers the
same token. Times are those of the engine's thread, so other programs on the machine change them little.
``process`` is everything after the forward pass, without the sampler's own calls. ``sample`` is the sampler
without its kernel. ``host`` is everything in ``Engine.step`` except for the forward pass and the sampler.
These are medians over the steps. ``worst`` is the longest ``host`` of a step, and ``prompts`` that of a step
with prompts. With ``--waiting N``, N more requests wait behind one that needs all blocks. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterable, Iterator
from random import Random
from statistics import median
from time import thread_time
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences import sampler, sampling_step
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel
from quire.kernels.cpu import threads
from quire.kvindex.block_hash import block_hash
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
BUDGET = 8192
"""Most tokens of a step."""
VOCAB_SIZE, TOKEN, EOS = 8, 5, 1


class StepTime(NamedTuple):
    """Seconds of the engine's thread that a step took around the model and the sampler."""

    schedule: float
    prepare: float
    process: float
    sample: float
    host: float


class Timed:
    """Calls a function, and adds up the seconds that this takes the thread."""

    def __init__(self, function: Any) -> None:
        self.seconds = 0.0
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        started_at = thread_time()
        result = self._function(*arguments)
        self.seconds += thread_time() - started_at
        return result


class FixedLogits(ModelRunner):
    """Prepares steps as usual and computes nothing: the same token is always the most probable."""

    def __init__(self, model: LoadedModel, memory: KvMemory) -> None:
        super().__init__(model, memory)
        self._logits = torch.nn.functional.one_hot(torch.full((BUDGET,), TOKEN), VOCAB_SIZE).float()

    def forward(self, step: StepTensors) -> torch.Tensor:
        return self._logits[: step.logit_rows.shape[0]]


def make_engine(batch: int, context: int, num_steps: int) -> Engine:
    """Return an engine with blocks for ``batch`` prompts of ``context`` tokens and their answers."""
    # While prompts are computed, those that came first get tokens already.
    most_tokens = context + num_steps + -(-batch * context // BUDGET) + BLOCK_SIZE
    num_blocks = -(-most_tokens // BLOCK_SIZE) * batch
    num_blocks += num_blocks // 50 + 1
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "float32"), num_blocks, torch.device("cpu"))
    model: Any = SimpleNamespace(
        recipe=None,
        window=None,
        has_windows=False,
        eos_token_ids=frozenset({EOS}),
        max_position_embeddings=num_blocks * BLOCK_SIZE,
    )
    # One more than the batch, so that what waits does so for blocks.
    config = SchedulerConfig(BLOCK_SIZE, max_num_seqs=batch + 1, max_num_batched_tokens=BUDGET)
    parts = EngineParts(runner=FixedLogits(model, memory), clock=thread_time)
    return Engine(model, memory, config, block_hash, parts=parts)


def add_requests(engine: Engine, batch: int, context: int, num_waiting: int) -> None:
    """Add the requests of the batch, and those that wait while it decodes."""
    # The lengths differ, so that the sequences do not all fill a block in the same step.
    lengths = [context - index % BLOCK_SIZE for index in range(batch)]
    if num_waiting:
        lengths += [engine.max_model_len - 1] + [BLOCK_SIZE] * (num_waiting - 1)
    params = SamplingParams(temperature=0.0, max_tokens=engine.max_model_len, ignore_eos=True)
    for index, length in enumerate(lengths):
        prompt = Random(index).choices(range(2, 30000), k=length)
        engine.add_request(Sequence(str(index), prompt, length, params, b"root"))


def time_steps(engine: Engine, batch: int, num_steps: int) -> Iterator[tuple[bool, StepTime]]:
    """Decode until there have been ``num_steps`` steps with a full batch; yield which they were."""
    sampling, kernel = Timed(sampler.sample), Timed(threads.run)
    with patch.object(sampling_step, "sample", sampling), patch.object(threads, "run", kernel):
        while num_steps:
            sampling.seconds, kernel.seconds, started_at = 0.0, 0.0, thread_time()
            engine.step()
            whole, phases = thread_time() - started_at, engine.step_seconds
            only_decodes = engine.num_step_tokens == engine.num_stepped == batch
            num_steps -= only_decodes
            process = phases.sample + phases.process - sampling.seconds
            sample = sampling.seconds - kernel.seconds
            host = whole - phases.forward - sampling.seconds
            yield only_decodes, StepTime(phases.schedule, phases.prepare, process, sample, host)


def measure(batches: Iterable[tuple[int, int]], num_steps: int, num_waiting: int) -> Iterator[dict[str, Any]]:
    """Yield the microseconds of each batch; print the same."""
    for batch, context in batches:
        engine = make_engine(batch, context, num_steps)
        add_requests(engine, batch, context, num_waiting)
        steps = list(time_steps(engine, batch, num_steps))
        decodes = [step for is_decode, step in steps if is_decode][1:]  # the first one grows arrays
        medians = StepTime(*map(median, zip(*decodes, strict=True)))
        times = {name: round(seconds * 1e6, 1) for name, seconds in medians._asdict().items()}
        times["worst"] = round(max(step.host for step in decodes) * 1e6, 1)
        times["prompts"] = round(max(step.host for is_decode, step in steps if not is_decode) * 1e6, 1)
        columns = "  ".join(f"{name} {value:8.1f}" for name, value in times.items())
        print(f"step overhead {batch:4} x {context:<6}  {columns} us", flush=True)
        yield {"batch": batch, "context": context, **{f"{name}_us": value for name, value in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="1x50,64x100,256x512,16x131072")
    parser.add_argument("--steps", type=int, default=200, help="steps of a full batch")
    parser.add_argument("--waiting", type=int, default=0, help="requests that wait meanwhile")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # as a worker does
    batches = [tuple(map(int, each.split("x"))) for each in arguments.batches.split(",")]
    pairs = ((batch, context) for batch, context in batches)
    rows = list(measure(pairs, arguments.steps, arguments.waiting))
    result = {"benchmark": "step_overhead", "steps": arguments.steps, "waiting": arguments.waiting}
    print(json.dumps({**result, "rows": rows}))


if __name__ == "__main__":
    main()
