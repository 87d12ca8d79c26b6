"""A chaos run: learns the right answers, sends load while faults happen, and checks what is left."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from rich.console import Console

from tests.soak.chaos.cluster import Cluster, ClusterConfig, running_cluster
from tests.soak.chaos.faults import FaultRunner
from tests.soak.chaos.journal import Journal
from tests.soak.chaos.load import Load, LoadReport
from tests.soak.chaos.requests import draw_templates
from tests.soak.chaos.rest import Size, check_rest, growth, measure
from tests.soak.chaos.schedule import MEAN_PAUSE, Fault, draw_schedule, num_first, rolling_restart

NOTE_SECONDS = 10.0


@dataclass(frozen=True)
class ChaosConfig:
    """What to run.

    Attributes:
        is_rolling: whether all processes are restarted in turn, instead of a random schedule of faults.
        mean_pause_seconds: mean time between the beginnings of two faults.
        minutes: time after which no fault begins.
        num_of_each: different requests of each kind.
        concurrency: requests in flight.
    """

    seed: int = 1
    num_faults: int = 100
    is_rolling: bool = False
    mean_pause_seconds: float = MEAN_PAUSE
    minutes: float = math.inf
    num_of_each: int = 12
    concurrency: int = 8
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def faults(self) -> list[Fault]:
        """The schedule."""
        shape = self.cluster.shape
        if self.is_rolling:
            return rolling_restart(shape)
        return draw_schedule(self.seed, self.num_faults, shape, self.mean_pause_seconds)


@dataclass
class ChaosReport:
    """What a run found.

    Attributes:
        faults: number of faults by kind.
        memory_mib: of each process after the first tenth of the faults and at the end; only processes that
            lived from one to the other.
    """

    config: ChaosConfig
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    undisturbed: LoadReport = field(default_factory=LoadReport)
    load: LoadReport = field(default_factory=LoadReport)
    memory_mib: dict[str, tuple[float, float]] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)


async def run_chaos(config: ChaosConfig, journal: Journal, console: Console) -> ChaosReport:
    """Run the schedule of a seed; what must not happen is in the report's ``defects``."""
    report = ChaosReport(config)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(config.cluster, journal))
        console.print(f"{journal.seconds:4.0f} s: the cluster runs")
        load = Load(cluster, draw_templates(config.seed, config.num_of_each), config.seed)
        stack.push_async_callback(load.close)
        report.undisturbed, report.load = load.undisturbed, load.report
        await load.learn_answers(config.concurrency)
        console.print(f"{journal.seconds:4.0f} s: the right answers are known")
        runner = FaultRunner(cluster)
        report.faults = runner.counts
        faults = config.faults
        # A rolling restart leaves no process whose sizes could be compared.
        num = 0 if config.is_rolling else num_first(len(faults))
        phases = _Phases(config, cluster, load, runner, console)
        before = await phases.run(faults[:num])
        after = await phases.run(faults[num:])
        _compare(report, cluster, before, after)
    report.seconds, report.defects = journal.seconds, journal.defects
    return report


@dataclass(frozen=True)
class _Phases:
    """Runs parts of a schedule under load, with a rest after each."""

    config: ChaosConfig
    cluster: Cluster
    load: Load
    runner: FaultRunner
    console: Console

    async def run(self, faults: Sequence[Fault]) -> dict[str, Size]:
        """Run faults under load; return what the processes use when all is healed and has come to rest."""
        is_over = False
        load = asyncio.create_task(self.load.run(self.config.concurrency, lambda: is_over))
        noting = asyncio.create_task(self._note())
        try:
            await self.runner.run(faults, 60 * self.config.minutes)
        finally:
            is_over = True
            await load
            noting.cancel()
        await self.cluster.until_complete()
        await check_rest(self.cluster)
        return await measure(self.cluster)

    async def _note(self) -> None:
        while True:
            await asyncio.sleep(NOTE_SECONDS)
            journal, outcomes = self.cluster.journal, Counter[str]()
            for (_, outcome), count in self.load.report.outcomes.items():
                outcomes[outcome] += count
            counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
            faults = f"{self.runner.counts.total()} of {len(self.config.faults)} faults"
            self.console.print(f"{journal.seconds:4.0f} s: {faults}; {counts}")


def _compare(report: ChaosReport, cluster: Cluster, before: dict[str, Size], after: dict[str, Size]) -> None:
    for name in before.keys() & after.keys():
        for problem in growth(name, before[name], after[name], cluster.shape):
            cluster.journal.record_defect(problem)
        if before[name].num_starts == after[name].num_starts:
            report.memory_mib[name] = (round(before[name].memory_mib, 1), round(after[name].memory_mib, 1))
