"""Gathers what ``quire top`` shows, from the router's admin port and the metrics of all processes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from math import inf
from typing import TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from quire.client.admin import AdminClient, RouterStatus

SCRAPE_SECONDS = 2.0
"""Time limit for reading the metrics of a process."""
MAX_SCRAPES = 16
"""Maximum number of processes that are asked at the same time."""
WINDOW_SECONDS = 60.0
"""Time over which latencies and hits are summed, since one second has few requests."""

ROUTER = ""
"""The router's place among the pages, beside the workers' ids."""


class Name(StrEnum):
    """The metrics that are read."""

    STARTED = "process_start_time_seconds"
    STEP_TOKENS = "quire_step_tokens_sum"
    MOVED_BYTES = "quire_kv_transfer_bytes_total"
    PUSHES = "quire_kv_push_seconds_count"
    PULLS = "quire_kv_pull_seconds_count"
    TTFT = "quire_time_to_first_token_seconds_bucket"
    RUNNING = "quire_router_requests_running"
    QUEUED = "quire_router_requests_waiting"
    SUCCESSES = "quire_request_success_total"
    FAILURES = "quire_request_failure_total"
    PROMPT_TOKENS = "quire_prompt_tokens_total"
    CACHED_TOKENS = "quire_prompt_tokens_cached_total"
    GENERATED_TOKENS = "quire_generation_tokens_total"


TENANT_TOKENS = "tokens by tenant"
"""Stands among the router's metrics, though the admin port reports it: it starts at 0 with the router too."""

Page: TypeAlias = Mapping[tuple[str, str], float]
"""The metrics of one process: values by name and by the label ``le``, ``direction`` or tenant, else empty."""


def parse(text: str) -> Counter[tuple[str, str]]:
    """Return the metrics of a page in Prometheus' text format, summed over all other labels."""
    lines = [line for line in text.splitlines() if line.startswith(tuple(Name))]
    page: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for name, labels, value, *_ in family.samples:
            page[name, labels.get("le") or labels.get("direction", "")] += value  # type: ignore[assignment]
    return page


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the router and the metrics said at one time."""

    seconds: float
    """A reading of a monotonic clock."""
    status: RouterStatus
    pages: Mapping[str, Page]
    """By worker id, and the router's; without processes whose metrics were not reached."""


def take_snapshot(client: AdminClient) -> Snapshot:
    """Ask the router that a client is connected to, and all its processes for their metrics.

    Raises:
        QuireError: the router does not answer.
    """
    status = client.status()
    addresses = {each.worker_id: each.metrics_address for each in status.workers}
    addresses[ROUTER] = status.metrics_address
    with ThreadPoolExecutor(MAX_SCRAPES) as executor:
        scraped = zip(addresses, executor.map(scrape, addresses.values()), strict=True)
        pages = {name: page for name, page in scraped if page}
    if ROUTER in pages:
        pages[ROUTER].update({(TENANT_TOKENS, each.name): each.num_tokens for each in status.tenants})
    return Snapshot(time.monotonic(), status, pages)


def scrape(address: str) -> Counter[tuple[str, str]]:
    """Return the metrics at a host:port; empty if they cannot be read."""
    # urllib would ask the proxy that the environment names.
    connection = HTTPConnection(address, timeout=SCRAPE_SECONDS)
    try:
        connection.request("GET", "/metrics")
        return parse(connection.getresponse().read().decode())
    except (OSError, HTTPException, ValueError):
        return Counter()
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two snapshots; with none before, since each process started."""

    now: Snapshot
    before: Snapshot | None

    def increase(self, name: str, label: str = "", of: str = ROUTER) -> float | None:
        """Return by how much a counter grew; None if its process was not reached both times.

        A process that started again in between has counted from 0.
        """
        page = self.now.pages.get(of)
        old: Page | None = {} if self.before is None else self.before.pages.get(of)
        if page is None or old is None:
            return None
        if page.get((Name.STARTED, "")) != old.get((Name.STARTED, "")):
            old = {}
        return page.get((name, label), 0.0) - old.get((name, label), 0.0)

    def rate(self, *counters: tuple[str, str], of: str = ROUTER) -> float | None:
        """Return the growth each second of the sum of counters, by their names and labels."""
        if self.before is None:
            return None
        grown = [self.increase(name, label, of) for name, label in counters]
        known = [each for each in grown if each is not None]
        return sum(known) / (self.now.seconds - self.before.seconds) if known else None

    def rate_of_workers(self, name: str, label: str = "") -> float | None:
        """Return the growth each second of a counter, summed over the workers that were reached."""
        rates = [self.rate((name, label), of=each.worker_id) for each in self.now.status.workers]
        known = [each for each in rates if each is not None]
        return sum(known) if known else None

    def hit_ratio(self) -> float | None:
        """Return the share of prompt tokens that were cached; None without any."""
        total, cached = self.increase(Name.PROMPT_TOKENS), self.increase(Name.CACHED_TOKENS)
        return (cached or 0.0) / total if total else None

    def time_to_first_token(self, share: float) -> float | None:
        """Return the seconds within which this share of requests got a token; None if there were none.

        Within a bucket of the histogram the times count as evenly spread, as in Prometheus.
        """
        page = self.now.pages.get(ROUTER, {})
        bounds = sorted((label for name, label in page if name == Name.TTFT), key=float)
        counts = [self.increase(Name.TTFT, label) or 0.0 for label in bounds]
        if not counts or not counts[-1]:
            return None
        rank, lower, below = share * counts[-1], 0.0, 0.0
        for bound, count in zip(map(float, bounds), counts, strict=True):
            if count >= rank and count > below:
                return lower if bound == inf else lower + (bound - lower) * (rank - below) / (count - below)
            lower, below = bound, count
        return lower


class History:
    """The snapshots of the last minute, oldest first."""

    def __init__(self) -> None:
        self._snapshots: deque[Snapshot] = deque()
        self.trend: deque[float] = deque(maxlen=int(WINDOW_SECONDS))
        """Generated tokens each second, oldest first."""

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot that is newer than all others."""
        self._snapshots.append(snapshot)
        while self._snapshots[0].seconds < snapshot.seconds - WINDOW_SECONDS:
            self._snapshots.popleft()
        if len(self._snapshots) > 1:
            self.trend.append(self.last.rate((Name.GENERATED_TOKENS, "")) or 0.0)

    @property
    def last(self) -> Change:
        """The change since the snapshot before the newest one."""
        return Change(self._snapshots[-1], self._snapshots[-2] if len(self._snapshots) > 1 else None)

    @property
    def minute(self) -> Change:
        """The change over the last minute."""
        return Change(self._snapshots[-1], self._snapshots[0] if len(self._snapshots) > 1 else None)
