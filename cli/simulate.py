"""``quire simulate``: how many workers, and which policy, by a model of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quire.cli import options
from quire.cli.failure import describe, fail
from quire.cli.spread import spread

if TYPE_CHECKING:
    from rich.table import Table

    from quire.client import AsyncClient
    from quire.simulator.calibration import Calibration
    from quire.simulator.capacity import Trial
    from quire.simulator.cluster import ClusterConfig
    from quire.simulator.figures import Slo
    from quire.simulator.trace import TraceRequest

CALIBRATION, REQUESTS, CLUSTER, OBJECTIVE = "Calibration", "Requests", "Cluster", "Objective"


class Shape(StrEnum):
    """What synthetic requests look like."""

    MOONCAKE = "mooncake"
    CHAT = "chat"
    SHARED = "shared"
    UNIQUE = "unique"


class PolicyName(StrEnum):
    """What decides who serves a request."""

    RANDOM = "random"
    LOAD = "load"
    APPROX = "approx"
    PRECISE = "precise"


def _option(flag: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, **more)


@spread
def simulate(
    *,
    calibration: Annotated[
        Path | None,
        _option("--calibration", "File of measured costs; by default the demo model's.", CALIBRATION),
    ] = None,
    calibrate: Annotated[
        str | None,
        _option("--calibrate", "Measure the idle cluster there first.", CALIBRATION, metavar="ADDRESS"),
    ] = None,
    save_calibration: Annotated[
        Path | None, _option("--save-calibration", "Write what was measured to this file.", CALIBRATION)
    ] = None,
    num_blocks: Annotated[
        int, _option("--num-blocks", "Blocks of a worker; for --calibrate.", CALIBRATION, min=1)
    ] = 8192,
    max_num_seqs: Annotated[
        int, _option("--max-num-seqs", "Most sequences in a step; for --calibrate.", CALIBRATION, min=1)
    ] = 64,
    trace: Annotated[
        Path | None, _option("--trace", "Replay this file, in the format of Mooncake's traces.", REQUESTS)
    ] = None,
    trace_block: Annotated[
        int, _option("--trace-block", "Tokens that a hash id of requests stands for.", REQUESTS, min=1)
    ] = 512,
    workload: Annotated[
        Shape, _option("--workload", "Without a trace: shape of synthetic requests.", REQUESTS)
    ] = Shape.MOONCAKE,
    num_requests: Annotated[int, _option("--num-requests", "How many.", REQUESTS, min=1)] = 2000,
    rate: Annotated[float, _option("--rate", "Requests a second.", REQUESTS, min=0.001)] = 6.56,
    speedup: Annotated[
        float, _option("--speedup", "Let a trace's requests come so much faster.", REQUESTS, min=0.001)
    ] = 1.0,
    input_len: Annotated[int, _option("--input-len", "Tokens of a prompt or turn.", REQUESTS, min=1)] = 1024,
    shared_len: Annotated[int, _option("--shared-len", "Tokens of a shared prefix.", REQUESTS, min=0)] = 768,
    output_len: Annotated[int, _option("--output-len", "Tokens of an answer.", REQUESTS, min=1)] = 64,
    save_trace: Annotated[
        Path | None, _option("--save-trace", "Write the requests to this file.", REQUESTS)
    ] = None,
    seed: Annotated[int, _option("--seed", "Same seed, same requests and choices.", REQUESTS)] = 0,
    num_prefill: Annotated[int, _option("--prefill", "Prefill workers.", CLUSTER, min=0)] = 2,
    num_decode: Annotated[int, _option("--decode", "Decode workers.", CLUSTER, min=1)] = 2,
    policies: Annotated[
        list[PolicyName] | None,
        _option("--policy", "Policy; may be repeated to compare. By default all.", CLUSTER),
    ] = None,
    pulls: Annotated[
        Literal["never", "measured", "always"], _option("--pulls", "When blocks are copied.", CLUSTER)
    ] = "measured",
    local_prefill_tokens: Annotated[
        int, _option("--local-prefill-tokens", "As of the router.", CLUSTER, min=0)
    ] = 64,
    max_requests: Annotated[
        int, _option("--max-requests", "More requests under way are refused.", CLUSTER, min=1)
    ] = 1024,
    find: Annotated[
        bool, _option("--find", "Search for the smallest cluster that meets the objective.", OBJECTIVE)
    ] = False,
    ttft: Annotated[float, _option("--ttft", "Longest time to the first token, in s.", OBJECTIVE)] = 2.0,
    tpot: Annotated[float, _option("--tpot", "Longest mean time of a token, in s.", OBJECTIVE)] = 0.1,
    share: Annotated[
        float, _option("--share", "Share of the requests that must be within both.", OBJECTIVE, min=0, max=1)
    ] = 0.9,
    max_workers: Annotated[int, _option("--max-workers", "Most workers to try.", OBJECTIVE, min=2)] = 64,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the times to this file.")] = None,
    api_key: options.ApiKey = None,
    encryption: options.ClientTls,
) -> None:
    """Replay requests on a model of a cluster: compare policies, or find how many workers an objective takes.

    Ends with one line of JSON.
    """
    import json

    from rich.console import Console

    from quire.client import AsyncClient, QuireError
    from quire.services.router.planner import PolicyConfig
    from quire.services.router.policy import Policy, Pulls
    from quire.simulator.calibration import (
        CalibrationError,
        demo_calibration,
        load_calibration,
        write_calibration,
    )
    from quire.simulator.capacity import NotWithinReach
    from quire.simulator.cluster import ClusterConfig
    from quire.simulator.figures import Slo
    from quire.simulator.trace import TraceError, read_trace, scaled, write_trace

    if find and plot is not None:
        raise typer.BadParameter("--plot compares policies on one cluster; leave out --find")
    try:
        if calibrate is not None:
            tls = encryption.files()
            connect = partial(AsyncClient, calibrate, api_key=api_key, tls=tls)
            costs = _measured(connect, num_blocks, max_num_seqs)
        else:
            costs = load_calibration(calibration) if calibration is not None else demo_calibration()
        if save_calibration is not None:
            write_calibration(save_calibration, costs)
        if trace is not None:
            requests = scaled(read_trace(trace)[:num_requests], speedup)
        else:
            requests = _synthetic(
                workload, num_requests, rate, seed, input_len, shared_len, output_len, trace_block
            )
        if save_trace is not None:
            write_trace(save_trace, requests)
    except (CalibrationError, TraceError, OSError) as error:
        fail(str(error))
    except QuireError as error:
        fail(describe(error, calibrate or ""))
    slo = Slo(ttft, tpot, share)
    configs = {
        name.value: ClusterConfig(
            num_prefill=num_prefill,
            num_decode=num_decode,
            placing=PolicyConfig(
                policy=Policy(name), pulls=Pulls(pulls), local_prefill_tokens=local_prefill_tokens
            ),
            max_requests=max_requests,
            seed=seed,
        )
        for name in policies or PolicyName
    }
    costs = costs.scaled_blocks(trace_block)
    try:
        trials = _find(configs, costs, requests, slo, max_workers) if find else None
    except NotWithinReach as error:
        fail(str(error))
    trials = trials or _compare(configs, costs, requests, slo, plot)
    Console().print(_table(trials, slo))
    kind = "find" if find else "compare"
    typer.echo(json.dumps({"simulate": kind, **_summary(requests, trace_block, slo, trials)}))


def _synthetic(
    shape: Shape,
    num_requests: int,
    rate: float,
    seed: int,
    input_len: int,
    shared_len: int,
    output_len: int,
    block_tokens: int,
) -> list[TraceRequest]:
    from quire.simulator.workload import Workload, make_requests

    return make_requests(
        Workload(shape),
        num_requests,
        rate,
        seed,
        input_tokens=input_len,
        shared_tokens=min(shared_len, input_len),
        output_tokens=output_len,
        block_tokens=block_tokens,
    )


def _summary(
    requests: list[TraceRequest], block_tokens: int, slo: Slo, trials: dict[str, Trial]
) -> dict[str, object]:
    from dataclasses import asdict

    from quire.simulator.trace import reusable_share

    return {
        "num_requests": len(requests),
        "input_tokens": sum(r.input_tokens for r in requests) / len(requests),
        "output_tokens": sum(r.output_tokens for r in requests) / len(requests),
        "reusable_share": round(reusable_share(requests, block_tokens), 4),
        "slo": asdict(slo),
        "results": {
            name: {
                "num_prefill": trial.num_prefill,
                "num_decode": trial.num_decode,
                **{key: round(value, 6) for key, value in asdict(trial.figures).items()},
            }
            for name, trial in trials.items()
        },
    }


def _compare(
    configs: dict[str, ClusterConfig],
    costs: Calibration,
    requests: list[TraceRequest],
    slo: Slo,
    plot: Path | None,
) -> dict[str, Trial]:
    from quire.simulator.capacity import Trial
    from quire.simulator.cluster import replay
    from quire.simulator.figures import figures

    replays = {}
    with _progress() as progress:
        for name, config in configs.items():
            task = progress.add_task(name, total=len(requests))
            replays[name] = replay(config, costs, requests, partial(progress.advance, task))
    if plot is not None:
        from quire.simulator.plots import plot_policies

        plot_policies({name: each.outcomes for name, each in replays.items()}, plot)
    return {
        name: Trial(configs[name].num_prefill, configs[name].num_decode, figures(each, slo))
        for name, each in replays.items()
    }


def _find(
    configs: dict[str, ClusterConfig],
    costs: Calibration,
    requests: list[TraceRequest],
    slo: Slo,
    max_workers: int,
) -> dict[str, Trial]:
    from quire.simulator.capacity import smallest_cluster

    trials = {}
    with _progress() as progress:
        for name, config in configs.items():
            task = progress.add_task(name, total=None)
            on_trial = partial(progress.advance, task)
            trials[name] = smallest_cluster(config, costs, requests, slo, max_workers, on_trial)
    return trials


def _measured(connect: Callable[[], AsyncClient], num_blocks: int, max_num_seqs: int) -> Calibration:
    import asyncio

    from quire.simulator.calibrate import calibrate

    with _progress() as progress:
        task = progress.add_task("calibrating", total=None)
        return asyncio.run(
            calibrate(
                connect,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                on_step=lambda step: progress.update(task, advance=1, description=step),
            )
        )


def _progress() -> Any:
    """Return bars on stderr, so that stdout holds the results alone; silent where nobody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _table(trials: dict[str, Trial], slo: Slo) -> Table:
    from rich.table import Table

    table = Table("policy", "workers", title="quire simulate", title_justify="left")
    objective = f"TTFT ≤ {slo.ttft_seconds:g} s, TPOT ≤ {slo.tpot_seconds * 1000:g} ms"
    for column in (
        *("TTFT p50", "p90", "p99 (s)", "TPOT p50", "p90 (ms)"),
        *("cached", "P busy", "D busy", "rejected", objective),
    ):
        table.add_column(column, justify="right")
    for name, trial in trials.items():
        f = trial.figures
        table.add_row(
            name,
            f"{trial.num_prefill}P {trial.num_decode}D",
            *(f"{each:.3f}" for each in (f.ttft_p50_seconds, f.ttft_p90_seconds, f.ttft_p99_seconds)),
            *(f"{each * 1000:.1f}" for each in (f.tpot_p50_seconds, f.tpot_p90_seconds)),
            *(f"{each:.0%}" for each in (f.cached_share, f.prefill_busy_share, f.decode_busy_share)),
            str(f.num_rejected),
            f"{f.slo_share:.1%}",
        )
    return table
