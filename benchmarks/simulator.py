"""The simulator beside a live stack of the same shape: calibrated on it, then both replay the same requests.

    python -m quire.benchmarks.simulator [--seconds 10]

Two prefill and two decode workers of the demo model on this machine. Prints a table of what was measured and
what was predicted, and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from quire.benchmarks.live_replay import LiveOutcome, measure_pulls, replay_live
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
from quire.simulator.cluster import ClusterConfig, RequestOutcome, replay
from quire.simulator.figures import quantile
from quire.simulator.trace import TraceRequest
from quire.simulator.workload import Workload, make_requests

NUM_PREFILL, NUM_DECODE, NUM_BLOCKS, MAX_NUM_SEQS = 2, 2, 8192, 64
RESULTS = Path("benchmarks/results")
CASES = (
    (Workload.SHARED, Policy.PRECISE, 2.0),
    (Workload.SHARED, Policy.PRECISE, 8.0),
    (Workload.SHARED, Policy.LOAD, 8.0),
    (Workload.CHAT, Policy.PRECISE, 6.0),
    (Workload.UNIQUE, Policy.PRECISE, 6.0),
)


def main() -> None:
    """Calibrate, replay, compare."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.simulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each replay")
    seconds = parser.parse_args().seconds
    console = Console()
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
                calibration = asyncio.run(_calibrate(stack, console))
                write_calibration(RESULTS / "simulator.calibration.json", calibration)
            block_tokens = calibration.block_tokens
            requests = make_requests(
                workload,
                max(8, int(seconds * rate)),
                rate,
                number,
                input_tokens=400 if workload is Workload.CHAT else 1024,
                output_tokens=16,
                block_tokens=block_tokens,
                chat_gap_seconds=1.0,
            )
            console.print(f"{workload}, {policy}, {rate:g} requests/s, {len(requests)} requests")
            measured = asyncio.run(replay_live(stack.address, requests, block_tokens))
        simulated = replay(
            ClusterConfig(num_prefill=NUM_PREFILL, num_decode=NUM_DECODE, placing=placing, seed=number),
            calibration,
            requests,
        )
        rows.append(_compare(workload, policy, rate, requests, measured, simulated.outcomes))
    assert calibration is not None
    console.print(_table(rows))
    _draw(rows, RESULTS / "simulator.png")
    line = json.dumps({"benchmark": "simulator", "calibration": asdict(calibration), "cases": rows})
    (RESULTS / "simulator.jsonl").write_text(line + "\n")
    print(line)


async def _calibrate(stack: RunningStack, console: Console) -> Calibration:
    pull_speed = await measure_pulls(stack)
    return await calibrate(
        partial(AsyncClient, stack.address),
        num_blocks=NUM_BLOCKS,
        max_num_seqs=MAX_NUM_SEQS,
        pull_speed=pull_speed,
        on_step=lambda step: console.print(f"calibrating: {step}"),
    )


def _compare(
    workload: Workload,
    policy: Policy,
    rate: float,
    requests: list[TraceRequest],
    measured: list[LiveOutcome],
    simulated: Any,
) -> dict[str, Any]:
    done = [outcome for outcome in measured if not outcome.error]
    return {
        "workload": workload.value,
        "policy": policy.value,
        "rate": rate,
        "num_requests": len(requests),
        "num_failed": len(measured) - len(done),
        "measured": _figures(done),
        "simulated": _figures(simulated),
    }


def _figures(outcomes: list[LiveOutcome] | list[RequestOutcome]) -> dict[str, float]:
    ttft = sorted(outcome.ttft_seconds for outcome in outcomes)
    tpot = sorted(outcome.tpot_seconds for outcome in outcomes)
    num_tokens = sum(outcome.request.input_tokens for outcome in outcomes)
    return {
        "ttft_p50_seconds": round(quantile(ttft, 0.5), 5),
        "ttft_p90_seconds": round(quantile(ttft, 0.9), 5),
        "tpot_p50_seconds": round(quantile(tpot, 0.5), 5),
        "cached_share": round(sum(outcome.cached_tokens for outcome in outcomes) / num_tokens, 4),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("requests", "rate", title="measured → simulated", title_justify="left")
    names = ("ttft_p50_seconds", "ttft_p90_seconds", "tpot_p50_seconds", "cached_share")
    for name in names:
        table.add_column(name.replace("_seconds", " (ms)"), justify="right")
    for row in rows:
        cells = []
        for name in names:
            factor = 100 if name == "cached_share" else 1000
            measured, simulated = row["measured"][name] * factor, row["simulated"][name] * factor
            cells.append(f"{measured:.1f} → {simulated:.1f}")
        table.add_row(f"{row['workload']}, {row['policy']}", f"{row['rate']:g}/s", *cells)
    return table


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['workload']}\n{row['policy']}\n{row['rate']:g}/s" for row in rows]
    for offset, kind in ((-0.2, "measured"), (0.2, "simulated")):
        heights = [row[kind]["ttft_p50_seconds"] * 1000 for row in rows]
        axes.bar([index + offset for index in range(len(rows))], heights, width=0.38, label=kind)
    axes.set_xticks(range(len(rows)), labels)
    axes.set_ylabel("median time to first token (ms)")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
