"""Compares the simulator with a live stack: it is calibrated on the stack, and both replay the same requests.

    python -m quire.benchmarks.simulator --seconds 10

The stack has two prefill and two decode workers of the demo model on this machine. The table has the measured
and the predicted figures.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from matplotlib.figure import Figure

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.benchmarks.live_replay import latencies, measure_pulls, replay_live
from quire.cli.bench.summary import OK
from quire.client import AsyncClient
from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Pulls
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from quire.simulator.calibrate import calibrate
from quire.simulator.calibration import Calibration, write_calibration
from quire.simulator.cluster import ClusterConfig, replay
from quire.simulator.workload import Workload, make_requests

NUM_PREFILL, NUM_DECODE, NUM_BLOCKS, MAX_NUM_SEQS = 2, 2, 8192, 64
CASES = (
    (Workload.SHARED, Policy.PRECISE, 2.0),
    (Workload.SHARED, Policy.PRECISE, 8.0),
    (Workload.SHARED, Policy.LOAD, 8.0),
    (Workload.CHAT, Policy.PRECISE, 6.0),
    (Workload.UNIQUE, Policy.PRECISE, 6.0),
)


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    seconds: Annotated[float, "length of each replay"] = 10.0
    calibration: Annotated[Path | None, "file to write the calibration to"] = None


@program
def main(options: Options) -> Report:
    """Calibrate, replay, compare."""
    calibration: Calibration | None = None
    rows: list[dict[str, Any]] = []
    for number, (workload, policy, rate) in enumerate(CASES):
        pulls = Pulls.MEASURED if policy is Policy.PRECISE else Pulls.NEVER
        placing = PolicyConfig(policy=policy, pulls=pulls)
        config = LocalStackConfig(
            num_prefill=NUM_PREFILL,
            num_decode=NUM_DECODE,
            router=RouterConfig(port=0, placing=placing),
            worker=WorkerConfig(role="decode", num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS),
            log_level="error",
        )
        with local_stack(config) as stack:
            if calibration is None:
                calibration = asyncio.run(_calibrate(stack))
                if options.calibration is not None:
                    write_calibration(options.calibration, calibration)
            block_tokens = calibration.block_tokens
            requests = make_requests(
                workload,
                max(8, int(options.seconds * rate)),
                rate,
                number,
                input_tokens=400 if workload is Workload.CHAT else 1024,
                output_tokens=16,
                block_tokens=block_tokens,
                chat_gap_seconds=1.0,
            )
            show_progress(f"{workload}, {policy}, {rate:g} requests/s, {len(requests)} requests")
            measured = asyncio.run(replay_live(stack.address, requests, block_tokens))
        simulated = replay(
            ClusterConfig(num_prefill=NUM_PREFILL, num_decode=NUM_DECODE, placing=placing, seed=number),
            calibration,
            requests,
        )
        done = [record for record in measured if record.status == OK]
        num_tokens = sum(each.request.input_tokens for each in simulated.outcomes)
        found = sum(each.cached_tokens for each in simulated.outcomes) / num_tokens
        cached = sum(each.cached_prompt_tokens for each in done) / sum(each.prompt_tokens for each in done)
        kinds = {
            "measured": {**latencies(done), "cached_share": round(cached, 4)},
            "simulated": {**latencies(simulated.outcomes), "cached_share": round(found, 4)},
        }
        counts = {"num_requests": len(requests), "num_failed": len(measured) - len(done)}
        rows.append({"workload": workload.value, "policy": policy.value, "rate": rate, **counts, **kinds})
    assert calibration is not None
    columns = {
        "requests": "{workload}, {policy}",
        "rate": "{rate:g}/s",
        "TTFT p50 (ms)": "{measured[ttft_p50_ms]:.1f} → {simulated[ttft_p50_ms]:.1f}",
        "TTFT p90 (ms)": "{measured[ttft_p90_ms]:.1f} → {simulated[ttft_p90_ms]:.1f}",
        "TPOT p50 (ms)": "{measured[tpot_p50_ms]:.1f} → {simulated[tpot_p50_ms]:.1f}",
        "cached": "{measured[cached_share]:.1%} → {simulated[cached_share]:.1%}",
    }
    return Report(
        [table("measured → simulated", rows, columns)],
        {"calibrated": calibration, "cases": rows},
        {"simulator.png": _draw(rows)},
    )


async def _calibrate(stack: RunningStack) -> Calibration:
    pull_speed = await measure_pulls(stack)
    return await calibrate(
        partial(AsyncClient, stack.address),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        pull_speed=pull_speed,
        on_step=lambda step: show_progress(f"calibrating: {step}"),
    )


def _draw(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['workload']}\n{row['policy']}\n{row['rate']:g}/s" for row in rows]
    for offset, kind in ((-0.2, "measured"), (0.2, "simulated")):
        heights = [row[kind]["ttft_p50_ms"] for row in rows]
        axes.bar([index + offset for index in range(len(rows))], heights, width=0.38, label=kind)
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("median time to first token (ms)")
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
