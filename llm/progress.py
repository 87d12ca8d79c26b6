"""The progress bar of a batch: finished requests and tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]
"""Takes the number of requests that ended and of tokens generated since the last call."""


@contextmanager
def progress_bar(num_requests: int, is_shown: bool) -> Iterator[Advance]:
    """Show a progress bar on stderr inside the context, and yield the function that advances it."""
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as progress:
        task = progress.add_task("", total=num_requests, rate=0.0)
        start, num_tokens = perf_counter(), 0

        def advance(num_ended: int, num_new_tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            progress.update(task, advance=num_ended, rate=num_tokens / (perf_counter() - start))

        yield advance
