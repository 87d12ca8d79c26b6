"""``quire simulate``: compares policies and sizes clusters by simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli import options
from quire.cli.failure import describe, fail
from quire.cli.results import print_table, progress_bars
from quire.cli.simulate_options import CalibrationOptions, ClusterOptions, ObjectiveOptions, RequestOptions
from quire.cli.spread import spread

if TYPE_CHECKING:
    from rich.table import Table

    from quire.client import AsyncClient
    from quire.simulator.calibration import Calibration
    from quire.simulator.capacity import Trial
    from quire.simulator.cluster import ClusterConfig
    from quire.simulator.figures import Slo
    from quire.simulator.trace import TraceRequest


@spread
def simulate(
    *,
    costs: CalibrationOptions,
    requested: RequestOptions,
    cluster: ClusterOptions,
    objective: ObjectiveOptions,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the times to this file.")] = None,
    api_key: options.ApiKey = None,
    encryption: options.ClientTls,
) -> None:
    """Replay requests on a simulated cluster: compare policies, or find how many workers an objective takes.

    The last line of the output is JSON.
    """
    import json

    from quire.client import AsyncClient, QuireError
    from quire.simulator.calibration import CalibrationError
    from quire.simulator.capacity import NotWithinReach
    from quire.simulator.trace import TraceError

    if objective.find and plot is not None:
        raise typer.BadParameter("--plot compares policies on one cluster; leave out --find")
    if plot is not None:
        _check_plot(plot)
    try:
        connect = partial(AsyncClient, costs.calibrate or "", api_key=api_key, tls=encryption.files())
        calibration = _calibration(costs, connect).scaled_blocks(requested.trace_block)
        requests, configs = requested.requests(), cluster.configs(requested.seed)
        trials = _trials(configs, calibration, requests, objective, plot)
    except (CalibrationError, TraceError, NotWithinReach, OSError) as error:
        fail(str(error))
    except QuireError as error:
        fail(describe(error, costs.calibrate or ""))
    slo = objective.slo()
    print_table(_table(trials, slo))
    kind = "find" if objective.find else "compare"
    typer.echo(json.dumps({"simulate": kind, **_summary(requests, requested.trace_block, slo, trials)}))


def _check_plot(path: Path) -> None:
    """Refuse a picture that could not be written after the simulation."""
    if find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "--plot needs the extra 'bench': in quire's clone, run .venv/bin/pip install -e '.[bench]'"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in kinds:
        raise typer.BadParameter(f"--plot must end with one of {', '.join(kinds)}; got {path.name}")


def _calibration(costs: CalibrationOptions, connect: Callable[[], AsyncClient]) -> Calibration:
    from quire.simulator.calibration import demo_calibration, load_calibration, write_calibration

    if costs.calibrate is not None:
        found = _measured(connect, costs.num_blocks, costs.max_num_seqs)
    else:
        found = load_calibration(costs.calibration) if costs.calibration else demo_calibration()
    if costs.save_calibration is not None:
        write_calibration(costs.save_calibration, found)
    return found


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


def _trials(
    configs: dict[str, ClusterConfig],
    costs: Calibration,
    requests: list[TraceRequest],
    objective: ObjectiveOptions,
    plot: Path | None,
) -> dict[str, Trial]:
    """Try each policy on its cluster, or on the smallest one that meets the objective."""
    from quire.simulator.capacity import Trial, smallest_cluster
    from quire.simulator.cluster import replay
    from quire.simulator.figures import figures, plot_policies

    trials, outcomes, slo = {}, {}, objective.slo()
    with progress_bars() as progress:
        for name, config in configs.items():
            task = progress.add_task(name, total=None if objective.find else len(requests))
            advance = partial(progress.advance, task)
            if objective.find:
                trials[name] = smallest_cluster(config, costs, requests, slo, objective.max_workers, advance)
            else:
                replayed = replay(config, costs, requests, advance)
                trials[name] = Trial(config.num_prefill, config.num_decode, figures(replayed, slo))
                outcomes[name] = replayed.outcomes
    if plot is not None:
        plot_policies(outcomes, plot)
    return trials


def _measured(connect: Callable[[], AsyncClient], num_blocks: int, max_num_seqs: int) -> Calibration:
    import asyncio

    from quire.simulator.calibrate import calibrate

    with progress_bars() as progress:
        task = progress.add_task("calibrating", total=None)
        return asyncio.run(
            calibrate(
                connect,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                on_step=lambda step: progress.update(task, advance=1, description=step),
            )
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
