"""Compares the simulator with a live stack: it is calibrated on the stack, and both replay the same requests.

    python -m quire.benchmarks.simulator --seconds 10

The stack has two prefill and two decode workers of the demo model on this machine. The loads are shares of
the rate at which the simulated workers answer requests that all arrive at once. The table has the median and
the range of what was measured, and the simulation with its difference from the median. A difference within
the range is no error of the simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from quire.benchmarks.harness.options import AtLeast
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.benchmarks.live_replay import latencies, measure_pulls, replay_live
from quire.cli.bench.summary import OK, RequestRecord
from quire.client import AsyncClient
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from quire.simulator.calibrate import calibrate
from quire.simulator.calibration import Calibration, write_calibration
from quire.simulator.cluster import ClusterConfig, Replay, replay
from quire.simulator.trace import TraceRequest
from quire.simulator.workload import Workload, make_requests

NUM_PREFILL, NUM_DECODE, NUM_BLOCKS, MAX_NUM_SEQS = 2, 2, 8192, 64
CLUSTER = ClusterConfig(num_prefill=NUM_PREFILL, num_decode=NUM_DECODE, is_one_machine=True)
WITHOUT_SHARING = replace(CLUSTER, is_one_machine=False)
CASES = (
    (Workload.UNIQUE, 0.2),
    (Workload.UNIQUE, 0.5),
    (Workload.UNIQUE, 0.85),
    (Workload.SHARED, 0.5),
    (Workload.CHAT, 0.5),
)
"""Workloads, and their loads as shares of the capacity."""
COLUMNS = {
    "ttft_p50_ms": ("TTFT p50 (ms)", 1),
    "ttft_p90_ms": ("TTFT p90 (ms)", 1),
    "tpot_p50_ms": ("TPOT p50 (ms)", 2),
    "tokens_per_second": ("tokens/s", 0),
}


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    seconds: Annotated[float, "length of each replay"] = 10.0
    repeats: Annotated[int, AtLeast(1), "replays of each load, each with other requests"] = 3
    save_calibration: Annotated[Path | None, "file to write the calibration to"] = None


@program
def main(options: Options) -> Report:
    """Calibrate, replay, compare."""
    config = LocalStackConfig(
        num_prefill=NUM_PREFILL,
        num_decode=NUM_DECODE,
        router=RouterConfig(port=0),
        worker=WorkerConfig(role="decode", num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS),
        log_level="error",
    )
    with local_stack(config) as stack:
        calibration = asyncio.run(_calibrate(stack))
        if options.save_calibration is not None:
            write_calibration(options.save_calibration, calibration)
        rows = [_compare(stack, calibration, options, number) for number in range(len(CASES))]
    columns = {
        "requests": "{workload}, {load:.0%}",
        "rate": "{rate:.1f}/s",
        **{title: f"{{{name}}}" for name, (title, _) in COLUMNS.items()},
        "cached": "{cached}",
    }
    printed = [
        {**row, **{name: _cell(row, name) for name in COLUMNS}, "cached": _cached(row)} for row in rows
    ]
    return Report(
        [table("measured (range) → simulated (difference)", printed, columns)],
        {"calibrated": calibration, "cases": rows},
    )


def _compare(stack: RunningStack, costs: Calibration, options: Options, number: int) -> dict[str, Any]:
    workload, load = CASES[number]
    rate = load * _capacity(workload, costs)
    kinds: dict[str, list[dict[str, float]]] = {"measured": [], "simulated": [], "without_sharing": []}
    num_failed = 0
    for repeat in range(options.repeats):
        seed = number * options.repeats + repeat
        requests = _requests(workload, max(8, int(options.seconds * rate)), rate, seed, costs.block_tokens)
        show_progress(f"{workload}, {rate:.1f} requests/s, {len(requests)} requests")
        measured = asyncio.run(replay_live(stack.address, requests, costs.block_tokens))
        done = [record for record in measured if record.status == OK]
        num_failed += len(measured) - len(done)
        kinds["measured"].append(_measured(done))
        for kind, config in (("simulated", CLUSTER), ("without_sharing", WITHOUT_SHARING)):
            kinds[kind].append(_simulated(replay(config, costs, requests)))
    return {"workload": workload.value, "load": load, "rate": rate, "num_failed": num_failed, **kinds}


def _measured(done: Sequence[RequestRecord]) -> dict[str, float]:
    seconds = max(record.end_seconds for record in done) - min(record.start_seconds for record in done)
    num_tokens = sum(record.prompt_tokens for record in done)
    return {
        **latencies(done),
        "tokens_per_second": round(sum(record.output_tokens for record in done) / seconds, 2),
        "cached_share": round(sum(record.cached_prompt_tokens for record in done) / num_tokens, 4),
    }


def _simulated(run: Replay) -> dict[str, float]:
    num_tokens = sum(outcome.request.input_tokens for outcome in run.outcomes)
    return {
        **latencies(run.outcomes),
        "tokens_per_second": round(sum(o.request.output_tokens for o in run.outcomes) / run.seconds, 2),
        "cached_share": round(sum(outcome.cached_tokens for outcome in run.outcomes) / num_tokens, 4),
    }


def _requests(
    workload: Workload, num_requests: int, rate: float, seed: int, block_tokens: int
) -> list[TraceRequest]:
    requests = make_requests(
        workload,
        num_requests,
        rate,
        seed,
        input_tokens=400 if workload is Workload.CHAT else 1024,
        output_tokens=32,
        block_tokens=block_tokens,
        chat_gap_seconds=1.0,
    )
    # The stack has cached the blocks of the replays before.
    first = 10**6 * seed
    return [each._replace(block_ids=tuple(first + block for block in each.block_ids)) for each in requests]


def _capacity(workload: Workload, costs: Calibration) -> float:
    """Return the simulated requests per second when all arrive at once."""
    requests = _requests(workload, 100, 1.0, 0, costs.block_tokens)
    at_once = [each._replace(arrival_seconds=0.0) for each in requests]
    return len(at_once) / replay(CLUSTER, costs, at_once).seconds


def _middle(figures: Sequence[dict[str, float]], name: str) -> float:
    return median(each[name] for each in figures)


def _cell(row: dict[str, Any], name: str) -> str:
    measured, simulated = (_middle(row[kind], name) for kind in ("measured", "simulated"))
    low, high = (choose(each[name] for each in row["measured"]) for choose in (min, max))
    digits = COLUMNS[name][1]
    found = f"{measured:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
    return f"{found} → {simulated:.{digits}f} ({simulated / measured - 1:+.0%})"


def _cached(row: dict[str, Any]) -> str:
    return " → ".join(f"{_middle(row[kind], 'cached_share'):.1%}" for kind in ("measured", "simulated"))


async def _calibrate(stack: RunningStack) -> Calibration:
    pull_speed = await measure_pulls(stack)
    return await calibrate(
        partial(AsyncClient, stack.address),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        pull_speed=pull_speed,
        on_step=lambda step: show_progress(f"calibrating: {step}"),
    )


if __name__ == "__main__":
    main()
