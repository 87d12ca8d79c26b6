"""The live screen, driven by Textual's pilot; skipped where the extra ``top`` is not installed."""

from __future__ import annotations

from itertools import count

import grpc
import pytest

pytest.importorskip("textual", reason="needs the extra 'top'")

from rich.console import Console
from textual.widgets import Footer, Static

from quire.cli.top import app as app_module
from quire.cli.top.app import TopApp
from quire.cli.top.snapshot import Snapshot
from quire.client import QuireError, Unavailable
from tests.testing.snapshots import counters, snapshot, worker


class Router:
    """A router that answers until it is lost, with one more worker in each snapshot."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self.error: QuireError | None = None

    def take(self) -> Snapshot:
        if self.error is not None:
            raise self.error
        number = next(self._numbers)
        workers = [worker(f"decode-{index}", used=number + index) for index in range(number)]
        return snapshot(float(number), *workers, router=counters(1, GENERATED_TOKENS=number * number))


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def app(router: Router, monkeypatch: pytest.MonkeyPatch) -> TopApp:
    """Return the screen, which takes no snapshot by itself."""
    monkeypatch.setattr(app_module, "REFRESH_SECONDS", 3600.0)
    return TopApp("127.0.0.1:8503", router.take, router.take())


def text_of(app: TopApp) -> str:
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(app.query_one(Static).content)
    return captured.get()


async def test_new_workers_appear_and_the_keys_are_shown(app: TopApp) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        assert "decode-0" in text_of(app)
        assert "decode-1" not in text_of(app)
        await app.take_snapshot()
        await pilot.pause()
        assert "decode-1" in text_of(app)
        assert "3 out/s" in text_of(app)
        drawn = app.export_screenshot()
        assert all(word in drawn for word in ("Sort", "Pause", "Quit", "decode"))
        assert app.query_one(Footer).region.bottom == 24


async def test_s_changes_the_order_and_p_pauses(app: TopApp) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await app.take_snapshot()
        for order in ("WORKER▼", "BLOCKS▼", "RUN▼", "TOKENS/S▼", "ROLE▼"):
            await pilot.press("s")
            assert order in text_of(app)
        await pilot.press("p")
        assert "paused" in text_of(app)
        await pilot.press("p")
        assert "paused" not in text_of(app)


async def test_a_paused_screen_asks_for_nothing(app: TopApp) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        await app.take_snapshot()
        assert "decode-1" not in text_of(app)
        await pilot.press("p")
        await app.take_snapshot()
        assert "decode-1" in text_of(app)


async def test_it_survives_a_router_that_goes_away(app: TopApp, router: Router) -> None:
    async with app.run_test(size=(80, 24)):
        router.error = Unavailable("refused", code=grpc.StatusCode.UNAVAILABLE)
        await app.take_snapshot()
        assert "the router does not answer (UNAVAILABLE)" in text_of(app)
        assert "decode-0" in text_of(app)
        router.error = None
        await app.take_snapshot()
        assert "does not answer" not in text_of(app)
        assert "decode-1" in text_of(app)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_q_and_ctrl_c_quit(app: TopApp, key: str) -> None:
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert not app.is_running
    assert app.return_code == 0
