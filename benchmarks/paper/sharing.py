"""Measures the KV memory that sharing blocks within a request saves (the paper's figure 15).

The saving is 1 - (used blocks / blocks without sharing), over all steps of a run of the real engine and the
demo model. The use is read in the middle of a step, after shared blocks have been copied for writing.
Different requests share nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from matplotlib.axes import Axes

from quire.benchmarks.harness.engines import BLOCK_SIZE, as_sequence, load_demo, make_engine, run_to_end
from quire.benchmarks.harness.tables import table
from quire.benchmarks.paper.report import Result, progress
from quire.benchmarks.paper.workload import ALPACA, SHAREGPT, Prompts, Request, make_prompts
from quire.engine.engine import Engine
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams, SamplingParams

WIDTHS = (2, 4, 6)
PAPER = {
    ("Alpaca-like", "parallel sampling"): (6.1, 9.8),
    ("Alpaca-like", "beam search"): (37.6, 55.2),
    ("ShareGPT-like", "parallel sampling"): (16.2, 30.5),
    ("ShareGPT-like", "beam search"): (44.3, 66.3),
}
"""Percent saved with 2 and with 6 sequences, section 6.3."""


class SharingRunner(ModelRunner):
    """Counts blocks before each forward pass."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.model, engine.memory)
        self._engine = engine
        self.num_used = 0
        self.num_unshared = 0

    def forward(self, step: StepTensors) -> torch.Tensor:
        """Count, then run the model."""
        groups = self._engine.groups.values()
        tables = [sequence.block_table for group in groups for sequence in group.sequences]
        self.num_used += self._engine.pool.counts.used
        self.num_unshared += sum(map(len, tables))
        return super().forward(step)

    @property
    def percent_saved(self) -> float:
        """Percentage of blocks that sharing saved."""
        return 100 * (1 - self.num_used / self.num_unshared)


def measure(model: LoadedModel, prompts: Prompts, requests: list[Request], params: SamplingParams) -> float:
    """Return the percent of blocks saved over a run."""
    engine = make_engine(model, num_blocks=4096, max_num_seqs=60)
    engine.runner = runner = SharingRunner(engine)
    run_to_end(
        engine,
        (
            as_sequence(index, prompts(num_input, index), replace(params, max_tokens=num_output, seed=index))
            for index, (num_input, num_output) in enumerate(requests)
        ),
    )
    return runner.percent_saved


def run(*, quick: bool) -> Result:
    """Measure samples and beams of 2, 4 and 6."""
    model, prompts = load_demo(), make_prompts()
    methods = {
        "parallel sampling": lambda width: SamplingParams(n=width, ignore_eos=True),
        "beam search": lambda width: SamplingParams(beam=BeamParams(width), ignore_eos=True),
    }
    data = [(ALPACA, 10)] if quick else [(ALPACA, 60), (SHAREGPT, 10)]
    cases = [(*each, method, width) for each in data for method in methods for width in WIDTHS]
    saved: dict[tuple[str, str], list[float]] = {}
    for lengths, num_requests, method, width in progress(cases, "sharing"):
        value = measure(model, prompts, lengths.draw(num_requests), methods[method](width))
        saved.setdefault((lengths.name, method), []).append(value)
    rows = [{"case": key, "saved": values, "paper": PAPER[key]} for key, values in saved.items()]
    columns = {
        "lengths": "{case[0]}",
        "decoding": "{case[1]}",
        **{f"{width} sequences": f"{{saved[{index}]:.1f}}" for index, width in enumerate(WIDTHS)},
        "paper, 2 to 6": "{paper[0]} to {paper[1]}",
    }
    return Result(
        table("KV memory saved by sharing within a request, %", rows, columns),
        f"Blocks of {BLOCK_SIZE}; the demo model; 1 - used / used without sharing, over all steps.",
        lambda axes: _draw(axes, saved),
        {"widths": WIDTHS, "percent_saved": {" / ".join(key): values for key, values in saved.items()}},
    )


def _draw(axes: Axes, saved: dict[tuple[str, str], list[float]]) -> None:
    for index, (key, values) in enumerate(saved.items()):
        axes.plot(WIDTHS, values, "o-", color=f"C{index}", label=", ".join(key))
        axes.plot(
            (WIDTHS[0], WIDTHS[-1]), PAPER[key], "x:", color=f"C{index}", label=f"{', '.join(key)}: paper"
        )
    axes.set_xlabel("sequences of a request")
    axes.set_ylabel("percent of KV memory saved")
    axes.legend(fontsize=7)
