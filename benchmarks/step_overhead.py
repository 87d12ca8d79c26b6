"""The CPU time that a step takes around the model and the sampler, for batches that decode.

    python -m quire.benchmarks.step_overhead --batches 1x50,64x100,256x512,16x131072 --steps 200

The engine is a real one, with prepared tensors, but its model computes nothing and always prefers the
same token. Times are those of the engine's thread, so other programs on the machine change them little.
``process`` is everything after the forward pass, without the sampler's own calls. ``sample`` is the sampler
without its kernel. ``host`` is everything in ``Engine.step`` except for the forward pass and the sampler.
These are medians over the steps. ``worst`` is the longest ``host`` of a step, and ``prompts`` that of a step
with prompts. With ``--waiting N``, N more requests wait behind one that needs all blocks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from time import thread_time
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch

from quire.benchmarks.harness.engines import BLOCK_SIZE, make_engine, model_without_layers
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import medians
from quire.benchmarks.harness.tables import table
from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.sequences import sampler, sampling_step
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel
from quire.kernels.cpu import threads
from quire.sampling.params import SamplingParams

BUDGET = 8192
"""Most tokens of a step."""
TOKEN = 5


class Batch(NamedTuple):
    """Sequences of a step, and the tokens of each one's prompt."""

    num_seqs: int
    context: int


def read_batch(text: str) -> Batch:
    """Return the batch that is written as ``64x100``."""
    return Batch(*map(int, text.split("x")))


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    batches: Annotated[tuple[str, ...], "sequences x tokens of a prompt"] = (
        "1x50",
        "64x100",
        "256x512",
        "16x131072",
    )
    steps: Annotated[int, "steps of a full batch"] = 200
    waiting: Annotated[int, "requests that wait meanwhile"] = 0


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
        self._logits = torch.nn.functional.one_hot(torch.full((BUDGET,), TOKEN), model.vocab_size).float()

    def forward(self, step: StepTensors) -> torch.Tensor:
        return self._logits[: step.logit_rows.shape[0]]


def open_engine(batch: int, context: int, num_steps: int) -> Engine:
    """Return an engine with blocks for ``batch`` prompts of ``context`` tokens and their answers."""
    # While prompts are computed, those that came first get tokens already.
    most_tokens = context + num_steps + -(-batch * context // BUDGET) + BLOCK_SIZE
    num_blocks = -(-most_tokens // BLOCK_SIZE) * batch
    num_blocks += num_blocks // 50 + 1
    model = model_without_layers(num_blocks * BLOCK_SIZE)
    # One more than the batch, so that what waits does so for blocks.
    engine = make_engine(
        model, num_blocks, max_num_seqs=batch + 1, max_num_batched_tokens=BUDGET, clock=thread_time
    )
    engine.runner = FixedLogits(model, engine.memory)
    return engine


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


def measure(batch: Batch, num_steps: int, num_waiting: int) -> dict[str, Any]:
    """Return the microseconds of a batch's steps."""
    engine = open_engine(*batch, num_steps)
    add_requests(engine, *batch, num_waiting)
    steps = list(time_steps(engine, batch.num_seqs, num_steps))
    decodes = [step for is_decode, step in steps if is_decode][1:]  # the first one grows arrays
    times = medians(decodes)._asdict()
    times["worst"] = max(step.host for step in decodes)
    times["prompts"] = max(step.host for is_decode, step in steps if not is_decode)
    return {**batch._asdict(), **{f"{name}_us": round(seconds * 1e6, 1) for name, seconds in times.items()}}


@program
def main(options: Options) -> Report:
    """Measure all batches."""
    torch.set_num_threads(1)
    gc.freeze()  # as a worker does
    rows = [measure(read_batch(each), options.steps, options.waiting) for each in options.batches]
    names = (*StepTime._fields, "worst", "prompts")
    columns = {f"{name} (µs)": f"{{{name}_us:.1f}}" for name in names}
    return Report(
        [table("CPU time around the model", rows, {"batch": "{num_seqs} x {context}", **columns})],
        {"rows": rows},
    )


if __name__ == "__main__":
    main()
