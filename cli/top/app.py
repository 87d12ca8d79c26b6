"""The live screen of ``quire top``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from quire.cli.top.snapshot import History, Snapshot
from quire.cli.top.view import ORDERS, Screen
from quire.client import QuireError

REFRESH_SECONDS = 1.0


class TopApp(App[None]):
    """Shows a snapshot each second until the user quits; without an answer it shows the last one and asks on.

    Args:
        address: that of the router's admin port.
        take: returns a new snapshot, or raises ``QuireError``; called in another thread.
        first: the snapshot to begin with.
    """

    CSS = """
    Screen { background: $background; }
    VerticalScroll { scrollbar-size-vertical: 1; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "next_order", "Sort by the next column"),
        Binding("p", "pause", "Pause"),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, address: str, take: Callable[[], Snapshot], first: Snapshot) -> None:
        super().__init__()
        self._address = address
        self._take = take
        self._history = History()
        self._history.add(first)
        self._order = next(iter(ORDERS))
        self._is_paused = False
        self._problem = ""

    def compose(self) -> ComposeResult:
        """Yield the numbers and the line with the keys."""
        with VerticalScroll():
            yield Static()
        yield Footer()

    def on_mount(self) -> None:
        """Show the first snapshot, and begin to ask for others."""
        self._draw()
        self.run_worker(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await self.take_snapshot()

    async def take_snapshot(self) -> None:
        """Unless paused, show a new snapshot, or that there is none."""
        if self._is_paused:
            return
        try:
            self._history.add(await asyncio.to_thread(self._take))
            self._problem = ""
        except QuireError as error:
            self._problem = f"the router does not answer ({error.code.name}); these numbers are old"
        self._draw()

    def _draw(self) -> None:
        screen = Screen(
            self._address,
            self._history.last,
            self._history.minute,
            tuple(self._history.trend),
            self._order,
            self._is_paused,
            self._problem,
        )
        self.query_one(Static).update(screen)

    def action_next_order(self) -> None:
        """Sort the workers by the next column."""
        names = list(ORDERS)
        self._order = names[(names.index(self._order) + 1) % len(names)]
        self._draw()

    def action_pause(self) -> None:
        """Stop asking for snapshots, or continue."""
        self._is_paused = not self._is_paused
        self._draw()
