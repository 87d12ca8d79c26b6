"""Routing policies on a live stack: the same requests, one policy after the other.

    python -m quire.benchmarks.policies [--seconds 6]

Two prefill and two decode workers serve the demo model on this machine, with one router for each policy.
Prompts with shared prefixes, chats, and prompts that share nothing arrive at a low and at a high rate. For
each of these loads the policies take turns repeatedly, each with its own prompts, so that other work on the
machine affects all of them equally. The cached share is compared with the oracle's, which is an unlimited
cache on one worker. Refused requests are counted. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from quire.benchmarks.live_replay import LiveOutcome, replay_live
from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Pulls
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import local_stack
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from quire.simulator.figures import quantile
from quire.simulator.trace import reusable_share
from quire.simulator.workload import Workload, make_requests

RESULTS = Path("benchmarks/results")
BLOCK_TOKENS = 16


class Contender(NamedTuple):
    """A way to place requests."""

    name: str
    placing: PolicyConfig


CONTENDERS = (
    Contender("load", PolicyConfig(policy=Policy.LOAD, pulls=Pulls.NEVER)),
    Contender("precise", PolicyConfig(policy=Policy.PRECISE, pulls=Pulls.NEVER)),
    Contender("precise + pulls", PolicyConfig()),
)
CASES = (
    (Workload.SHARED, 1.5),
    (Workload.SHARED, 6.0),
    (Workload.CHAT, 1.5),
    (Workload.CHAT, 6.0),
    (Workload.UNIQUE, 1.5),
    (Workload.UNIQUE, 4.0),
)


def main() -> None:
    """Measure all policies."""
    parser = argparse.ArgumentParser(prog="python -m quire.benchmarks.policies", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is made")
    arguments = parser.parse_args()
    secret = os.environ["QUIRE_CLUSTER_SECRET"] = secrets.token_hex(16)
    with RedisProcess() as redis:
        config = LocalStackConfig(
            num_prefill=2,
            num_decode=2,
            redis_url=redis.worker_url,
            router=RouterConfig(port=0),
            log_level="error",
        )
        with local_stack(config):
            base = RouterConfig(
                port=0, metrics_port=0, redis_url=redis.router_url, cluster_secret=secret.encode()
            )
            rows = asyncio.run(_measure(base, arguments.seconds, arguments.rounds))
    Console().print(_table(rows))
    _draw(rows, RESULTS / "policies.png")
    line = json.dumps({"benchmark": "policies", **vars(arguments), "rows": rows})
    (RESULTS / "policies.jsonl").write_text(line + "\n")
    print(line)


async def _measure(base: RouterConfig, seconds: float, rounds: int) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        addresses = {}
        for contender in CONTENDERS:
            running = await stack.enter_async_context(router(replace(base, placing=contender.placing)))
            await running.has_served.wait()
            while len(running.workers.live("prefill") + running.workers.live("decode")) < 4:
                await running.workers.refresh()
            addresses[contender.name] = running.address
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        task = progress.add_task("policies", total=len(CONTENDERS) * len(CASES) * rounds)
        rows = []
        fresh = count(1)
        for workload, rate in CASES:
            outcomes: dict[str, list[LiveOutcome]] = {name: [] for name in addresses}
            oracles = []
            for number in range(rounds):
                requests = make_requests(
                    workload,
                    max(6, int(seconds * rate)),
                    rate,
                    number,
                    input_tokens=500 if workload is Workload.CHAT else 2048,
                    shared_tokens=1536,
                    output_tokens=16,
                    block_tokens=BLOCK_TOKENS,
                    chat_gap_seconds=1.0,
                )
                oracles.append(reusable_share(requests, BLOCK_TOKENS))
                names = list(addresses)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    # Blocks from another policy's requests must not help this one.
                    first_id = next(fresh) * 10**6
                    own = [r._replace(block_ids=tuple(b + first_id for b in r.block_ids)) for r in requests]
                    outcomes[name] += await replay_live(addresses[name], own, BLOCK_TOKENS)
                    progress.advance(task)
            oracle = round(sum(oracles) / rounds, 4)
            rows += [_row(name, workload, rate, each, oracle) for name, each in outcomes.items()]
        return rows


def _row(
    name: str, workload: Workload, rate: float, outcomes: Sequence[LiveOutcome], oracle: float
) -> dict[str, Any]:
    done = [outcome for outcome in outcomes if not outcome.error]
    ttft = sorted(outcome.ttft_seconds for outcome in done)
    num_tokens = sum(outcome.request.input_tokens for outcome in done)
    return {
        "policy": name,
        "workload": workload.value,
        "rate": rate,
        "num_requests": len(outcomes),
        "failures": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        "ttft_p50_seconds": round(quantile(ttft, 0.5), 4),
        "ttft_p90_seconds": round(quantile(ttft, 0.9), 4),
        "tpot_p50_seconds": round(quantile(sorted(o.tpot_seconds for o in done), 0.5), 4),
        "cached_share": round(sum(o.cached_tokens for o in done) / num_tokens, 4) if num_tokens else 0.0,
        "oracle_share": oracle,
        "pulled_bytes": sum(o.pulled_bytes for o in done),
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("requests", "policy", title="Routing policies, 2P 2D", title_justify="left")
    for column in ("TTFT p50 (ms)", "p90", "TPOT p50 (ms)", "cached", "oracle", "pulled (MiB)", "failed"):
        table.add_column(column, justify="right")
    for row in sorted(rows, key=lambda row: (row["workload"], row["rate"])):
        table.add_row(
            f"{row['workload']}, {row['rate']:g}/s",
            row["policy"],
            f"{row['ttft_p50_seconds'] * 1000:.0f}",
            f"{row['ttft_p90_seconds'] * 1000:.0f}",
            f"{row['tpot_p50_seconds'] * 1000:.1f}",
            f"{row['cached_share']:.0%}",
            f"{row['oracle_share']:.0%}",
            f"{row['pulled_bytes'] / 2**20:.1f}",
            str(sum(row["failures"].values())),
        )
    return table


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    names = [contender.name for contender in CONTENDERS]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        own = {(row["workload"], row["rate"]): row for row in rows if row["policy"] == name}
        places = [case + (index - len(names) / 2) * width for case in range(len(CASES))]
        picked = [own[workload.value, rate] for workload, rate in CASES]
        panels[0].bar(places, [row["ttft_p50_seconds"] * 1000 for row in picked], width, label=name)
        panels[1].bar(places, [row["cached_share"] * 100 for row in picked], width)
    panels[0].set_ylabel("median TTFT (ms)")
    panels[1].set_ylabel("cached prompt tokens (%)")
    panels[1].set_xticks(range(len(CASES)), [f"{workload.value}\n{rate:g}/s" for workload, rate in CASES])
    panels[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
