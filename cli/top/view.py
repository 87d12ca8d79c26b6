"""Draws what ``quire top`` shows, in a terminal and over a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quire.cli.sizes import format_size
from quire.cli.top.snapshot import ROUTER, TENANT_TOKENS, Change, Name
from quire.client.admin import WorkerLoad, WorkerStatus

WIDE_COLUMNS = 110
"""Fewest columns of a terminal in which the table of workers has all its columns."""
USED, CACHED, FREE = ("▆", "#5b8def"), ("▄", "#3f5f9f"), ("▁", "#50566a")
"""Marks of blocks by state, which differ without colours too."""
FINE, WARN, BAD, DIM = "#7fb86a", "#d9a441", "#e0605e", "#828997"
ROLES = {"prefill": "#c58fd8", "decode": "#4fb3bf"}
LEVELS = "▁▂▃▄▅▆▇█"
MAX_NAME_COLUMNS = 16
NONE = "-"
TITLE = "bold default"


def _tokens(worker: WorkerStatus, change: Change) -> float | None:
    return change.rate((Name.STEP_TOKENS, ""), of=worker.worker_id)


def _used_share(load: WorkerLoad) -> float:
    return load.used_blocks / max(1, load.used_blocks + load.cached_blocks + load.free_blocks)


ORDERS: dict[str, Callable[[WorkerStatus, Change], Any]] = {
    "ROLE": lambda worker, change: worker.role,
    "WORKER": lambda worker, change: worker.worker_id,
    "BLOCKS": lambda worker, change: -_used_share(worker.load) if worker.load else 1,
    "RUN": lambda worker, change: -worker.load.num_running if worker.load else 1,
    "TOKENS/S": lambda worker, change: -(_tokens(worker, change) or 0),
}
"""What workers may be sorted by, named by the column's heading; the busiest come first."""


@dataclass(frozen=True, slots=True)
class Screen:
    """All that is shown at one time.

    Attributes:
        last: since the snapshot before.
        long: over the last minute, or since the start.
        trend: generated tokens each second, oldest first.
        problem: why the numbers are old; empty: they are not.
    """

    address: str
    last: Change
    long: Change
    trend: Sequence[float] = ()
    order: str = "ROLE"
    is_paused: bool = False
    problem: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts, one below the other."""
        if self.problem:
            yield Text(f" {self.problem} ", f"bold reverse {BAD}", no_wrap=True, overflow="ellipsis")
        yield self._summary()
        yield self._workers(options.max_width >= WIDE_COLUMNS)
        if any(each.name for each in self.last.now.status.tenants):
            yield self._tenants()

    def _summary(self) -> Panel:
        last, long, page = self.last, self.long, self.last.now.pages.get(ROUTER, {})
        queued = page.get((Name.QUEUED, ""))
        rows: list[tuple[RenderableType, ...]] = [
            tuple(Text(each, DIM) for each in ("REQUESTS", "TOKENS", "FIRST TOKEN", "KV BLOCKS")),
            (
                _value(page.get((Name.RUNNING, "")), "running"),
                _value(last.rate((Name.PROMPT_TOKENS, "")), "in/s"),
                _value(long.time_to_first_token(0.5), "p50", _milliseconds),
                _value(long.hit_ratio(), "of prompts cached", "{:.0%}".format),
            ),
            (
                _value(queued, "in the queue", style=WARN if queued else "bold"),
                _value(last.rate((Name.GENERATED_TOKENS, "")), "out/s"),
                _value(long.time_to_first_token(0.99), "p99", _milliseconds),
                self._moves(Name.PUSHES, "pushes", "sent"),
            ),
            (
                _value(last.rate((Name.SUCCESSES, ""), (Name.FAILURES, "")), "finished/s"),
                Text(sparkline(self.trend[-14:]), USED[1]),
                Text("since start" if long.before is None else "last minute", DIM),
                self._moves(Name.PULLS, "pulls", "pulled"),
            ),
        ]
        grid = Table.grid(padding=(0, 2), expand=True)
        for ratio in (16, 14, 14, 25):
            grid.add_column(ratio=ratio, no_wrap=True)
        for row in rows:
            grid.add_row(*row)
        models = ", ".join(sorted({each.model for each in self.last.now.status.workers})) or "no worker"
        title = Text.assemble((f" {models}", TITLE), (f" at {self.address} ", DIM))
        return _panel(grid, title, Text(" paused ", f"bold reverse {WARN}") if self.is_paused else None)

    def _moves(self, counter: str, what: str, direction: str) -> Text:
        num_bytes = self.last.rate_of_workers(Name.MOVED_BYTES, direction)
        return _value(self.last.rate_of_workers(counter), f"{what}/s, {size(num_bytes)}/s")

    def _workers(self, is_wide: bool) -> Panel:
        shows_revision = is_wide or len({each.revision for each in self.last.now.status.workers}) > 1
        headings = ["WORKER", "ROLE", *["REVISION"] * shows_revision, "STATE", "BLOCKS", "USED"]
        headings += ["RUN", "WAIT", "MOVE", "TOKENS/S"]
        if is_wide:
            headings += ["FREE", "CACHED", "OUT/S", "IN/S"]
        elif not shows_revision:
            headings += ["KV/S"]
        table = _table(headings, num_texts=4 + shows_revision, wide="BLOCKS", order=self.order)
        workers = sorted(self.last.now.status.workers, key=lambda each: each.worker_id)
        workers.sort(key=lambda each: ORDERS[self.order](each, self.last))
        for worker in workers:
            cells = dict(self._worker(worker))
            table.add_row(*(cells[name] for name in headings))
        legend = Text()
        for (mark, color), name in ((USED, "used"), (CACHED, "cached"), (FREE, "free")):
            legend.append(f" {mark * 2}", color).append(f" {name} ", DIM)
        return _panel(table, Text(" workers ", TITLE), legend)

    def _worker(self, worker: WorkerStatus) -> Iterator[tuple[str, RenderableType]]:
        """Yield the cells of a worker's row by their headings."""
        load = worker.load
        yield "WORKER", Text(worker.worker_id, "bold", overflow="ellipsis")
        yield "ROLE", Text(worker.role, ROLES[worker.role])
        yield "REVISION", worker.revision
        yield "STATE", Text(worker.state, {"serving": FINE, "silent": BAD}.get(worker.state, WARN))
        yield (
            "BLOCKS",
            Bar(load.used_blocks, load.cached_blocks, load.free_blocks) if load else Text("no answer", BAD),
        )
        yield "USED", f"{_used_share(load):.0%}" if load else NONE
        numbers = (load.num_running, load.num_waiting, load.num_transferring) if load else [None] * 3
        for heading, number in zip(("RUN", "WAIT", "MOVE"), numbers, strict=True):
            yield heading, Text(count(number), "bold" if number else DIM)
        yield "TOKENS/S", count(_tokens(worker, self.last))
        yield "FREE", count(load.free_blocks if load else None)
        yield "CACHED", count(load.cached_blocks if load else None)
        sent, received = (
            [(Name.MOVED_BYTES, each) for each in pair] for pair in (("sent", "lent"), ("received", "pulled"))
        )
        for heading, counters in (("OUT/S", sent), ("IN/S", received), ("KV/S", sent + received)):
            yield heading, size(self.last.rate(*counters, of=worker.worker_id))

    def _tenants(self) -> Panel:
        headings = ("TENANT", "SHARE OF TOKENS", "REQUESTS", "WAITING", "TOKENS/S", "TOKENS")
        table = _table(headings, num_texts=2, wide="SHARE OF TOKENS")
        tenants = self.last.now.status.tenants
        rates = {each.name: self.last.rate((TENANT_TOKENS, each.name)) for each in tenants}
        total = sum(rate or 0 for rate in rates.values())
        for tenant in sorted(tenants, key=lambda each: -(rates[each.name] or 0)):
            rate = rates[tenant.name]
            waiting = Text(count(tenant.num_waiting), f"bold {WARN}" if tenant.num_waiting else DIM)
            row = (Bar(rate or 0, 0, total - (rate or 0)), count(tenant.num_requests), waiting)
            table.add_row(Text(tenant.name, "bold"), *row, count(rate), count(tenant.num_tokens))
        return _panel(table, Text(" tenants ", TITLE))


@dataclass(frozen=True, slots=True)
class Bar:
    """Used, cached and free blocks, or other parts, as a line that is as wide as its column."""

    used: float
    cached: float
    free: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line; a few used blocks of thousands are still seen."""
        total, width = self.used + self.cached + self.free or 1, options.max_width
        used = max(round(width * self.used / total), min(1, ceil(self.used)))
        cached = round(width * (self.used + self.cached) / total) - used
        lengths = (used, max(0, cached), width - used - max(0, cached))
        parts = zip((USED, CACHED, FREE), lengths, strict=True)
        yield Text.assemble(*((mark * length, color) for (mark, color), length in parts))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return that it takes what room there is, from six columns on."""
        return Measurement(6, options.max_width)


def sparkline(values: Sequence[float]) -> str:
    """Return a character for each value, whose height shows its share of the largest one."""
    top = max(values, default=0) or 1
    return "".join(LEVELS[round(value / top * (len(LEVELS) - 1))] for value in values)


def count(number: float | None) -> str:
    """Return a number, with a decimal if it is below ten; a dash for none."""
    if number is None:
        return NONE
    return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def size(num_bytes: float | None) -> str:
    """Return a size with a unit; a dash for none."""
    return NONE if num_bytes is None else format_size(round(num_bytes))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


def _value(
    number: float | None, what: str, form: Callable[[float], str] = count, *, style: str = "bold"
) -> Text:
    return Text.assemble((NONE if number is None else form(number), style), (f" {what}", DIM))


def _table(headings: Sequence[str], *, num_texts: int, wide: str, order: str = "") -> Table:
    """Return a table whose first columns are texts and the others numbers; ``wide`` gets the room left."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, header_style="default")
    for index, name in enumerate(headings):
        table.add_column(
            Text(f"{name}▼", "bold") if name == order else Text(name, DIM),
            justify="left" if index < num_texts else "right",
            no_wrap=True,
            ratio=1 if name == wide else None,
            max_width=MAX_NAME_COLUMNS if index == 0 else None,
        )
    return table


def _panel(inside: RenderableType, title: Text, subtitle: Text | None = None) -> Panel:
    return Panel(
        inside,
        box=box.ROUNDED,
        border_style=FREE[1],
        title=title,
        title_align="left",
        subtitle=subtitle,
        subtitle_align="right",
    )
