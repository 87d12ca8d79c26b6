"""Routing policies on a live stack: the same requests, one policy after the other.

    python -m quire.benchmarks.policies --seconds 6 --rounds 2

Two prefill and two decode workers serve the demo model on this machine, with one router for each policy.
Prompts with shared prefixes, chats, and prompts that share nothing arrive at a low and at a high rate. For
each of these loads the policies take turns repeatedly, each with its own prompts, so that other work on the
machine affects all of them equally. The cached share is compared with the oracle's, which is an unlimited
cache on one worker. Refused requests are counted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.rounds import turns
from quire.benchmarks.harness.tables import table
from quire.benchmarks.live_replay import LiveOutcome, latencies, replay_live
from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Pulls
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import local_stack
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from quire.simulator.trace import reusable_share
from quire.simulator.workload import Workload, make_requests

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


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    seconds: Annotated[float, "length of each measurement"] = 4.0
    rounds: Annotated[int, "how often each is made"] = 3


@program
def main(options: Options) -> Report:
    """Measure all policies."""
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
            rows = asyncio.run(_measure(base, options.seconds, options.rounds))
    columns = {
        "requests": "{workload}, {rate:g}/s",
        "policy": "{policy}",
        "TTFT p50 (ms)": "{ttft_p50_ms:.0f}",
        "p90": "{ttft_p90_ms:.0f}",
        "TPOT p50 (ms)": "{tpot_p50_ms:.1f}",
        "cached": "{cached_share:.0%}",
        "oracle (ceiling)": "{oracle_share:.0%}",
        "pulled (MiB)": "{pulled_mib:.1f}",
        "failed": "{num_failed}",
    }
    pictures = {"policies.png": _draw(rows)}
    return Report([table("Routing policies, 2P 2D", rows, columns)], {"rows": rows}, pictures)


async def _measure(base: RouterConfig, seconds: float, rounds: int) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        addresses = {}
        for contender in CONTENDERS:
            running = await stack.enter_async_context(router(replace(base, placing=contender.placing)))
            await running.has_served.wait()
            while len(running.workers.live("prefill") + running.workers.live("decode")) < 4:
                await running.workers.refresh()
            addresses[contender.name] = running.address
        rows = []
        fresh = count(1)
        for workload, rate in CASES:
            outcomes: dict[str, list[LiveOutcome]] = {name: [] for name in addresses}
            oracles = []
            steps = list(turns(addresses, rounds, warm_up=0))
            for number, name in track(
                steps, f"{workload}, {rate:g}/s", console=Console(stderr=True), transient=True
            ):
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
                # Blocks from another policy's requests must not help this one.
                first_id = next(fresh) * 10**6
                own = [r._replace(block_ids=tuple(b + first_id for b in r.block_ids)) for r in requests]
                outcomes[name] += await replay_live(addresses[name], own, BLOCK_TOKENS)
            oracle = round(sum(oracles) / len(oracles), 4)
            rows += [_row(name, workload, rate, each, oracle) for name, each in outcomes.items()]
        return rows


def _row(
    name: str, workload: Workload, rate: float, outcomes: Sequence[LiveOutcome], oracle: float
) -> dict[str, Any]:
    done = [outcome for outcome in outcomes if not outcome.error]
    return {
        "policy": name,
        "workload": workload.value,
        "rate": rate,
        "num_requests": len(outcomes),
        "num_failed": len(outcomes) - len(done),
        "failures": dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        **latencies(done),
        "oracle_share": oracle,
        "pulled_mib": round(sum(o.pulled_bytes for o in done) / 2**20, 2),
    }


def _draw(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    names = [contender.name for contender in CONTENDERS]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        own = {(row["workload"], row["rate"]): row for row in rows if row["policy"] == name}
        places = [case + (index - len(names) / 2) * width for case in range(len(CASES))]
        picked = [own[workload.value, rate] for workload, rate in CASES]
        panels[0].bar(places, [row["ttft_p50_ms"] for row in picked], width, label=name)
        panels[1].bar(places, [row["cached_share"] * 100 for row in picked], width)
    panels[0].set_ylabel("median TTFT (ms)")
    panels[1].set_ylabel("cached prompt tokens (%)")
    panels[1].set_xticks(range(len(CASES)), [f"{workload.value}\n{rate:g}/s" for workload, rate in CASES])
    panels[0].legend()
    return figure


if __name__ == "__main__":
    main()
