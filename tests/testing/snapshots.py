"""Snapshots of ``quire top`` without processes."""

from __future__ import annotations

from typing import Literal

from quire.cli.top.snapshot import ROUTER, TENANT_TOKENS, Name, Page, Snapshot
from quire.client.admin import RouterStatus, TenantStatus, WorkerLoad, WorkerStatus


def worker(
    worker_id: str,
    role: Literal["prefill", "decode"] = "decode",
    *,
    used: int = 0,
    running: int = 0,
    is_draining: bool = False,
    is_silent: bool = False,
    is_waiting: bool = False,
    revision: str = "a0b1c2d3",
) -> WorkerStatus:
    """Return a worker with 100 blocks, of which 20 are cached."""
    load = WorkerLoad(running, 0, 0, used_blocks=used, cached_blocks=20, free_blocks=80 - used)
    known = None if is_silent else load
    return WorkerStatus(
        worker_id, role, "host:1", is_draining, running, known, "demo", "host:2", revision, is_waiting
    )


def counters(started: float, **counts: float) -> dict[tuple[str, str], float]:
    """Return the metrics of a process, by the names in ``Name``; those not given are 0."""
    page = {(str(name), ""): 0.0 for name in Name if name is not Name.TTFT}
    return page | {(Name.STARTED, ""): started} | {(Name[name], ""): count for name, count in counts.items()}


def snapshot(
    seconds: float, *workers: WorkerStatus, tenants: tuple[TenantStatus, ...] = (), **pages: Page
) -> Snapshot:
    """Return a snapshot; ``pages`` are metrics by worker, with underscores, and those of ``router``."""
    named = {
        ROUTER if name == "router" else name.replace("_", "-"): dict(page) for name, page in pages.items()
    }
    for tenant in tenants:
        named[ROUTER][TENANT_TOKENS, tenant.name] = tenant.num_tokens
    return Snapshot(seconds, RouterStatus(workers, tenants, "host:3"), named)
