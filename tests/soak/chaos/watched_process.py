"""Runs ``quire`` as one process of a chaos run, which reports its tasks and channels on SIGUSR1."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
from collections import Counter
from typing import Any

import grpc.aio

REPORT = "chaos_report "
"""Beginning of the line on standard output that a report is."""


def main() -> None:
    """Run the command; the process ends with the one that started it."""
    from quire.cli.main import main as quire_main
    from quire.services.server.process import end_with_parent

    end_with_parent()
    signal.signal(signal.SIGUSR1, _print_report)
    quire_main()


def _print_report(number: int, frame: object) -> None:
    """Print how many tasks there are of each coroutine, and how many open channels."""
    try:
        tasks = asyncio.all_tasks(asyncio.get_running_loop())
    except RuntimeError:
        tasks = set()
    gc.unfreeze()  # a router freezes what it has once it is ready, and frozen objects are not listed
    gc.collect()  # gRPC keeps the connection of a closed channel until its calls are collected
    names = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in tasks)
    print(
        REPORT + json.dumps({"tasks": names, "channels": sum(map(_is_open_channel, gc.get_objects()))}),
        flush=True,
    )


def _is_open_channel(each: Any) -> bool:
    # Not isinstance, which asks an object of any kind for its __class__.
    return issubclass(type(each), grpc.aio.Channel) and not each._channel.closed()
