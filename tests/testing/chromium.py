"""A Chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse

from tests.testing.until import until

_NAMES = "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"
PROGRAM = next((found for name in _NAMES if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason=f"none of {', '.join(_NAMES)} is on the PATH")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
    "about:blank",
)
SECONDS = 60.0


class Page:
    """One page of the browser.

    Attributes:
        problems: what the page has logged, and exceptions that nothing caught.
    """

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._session = ""
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Return the result of a method of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": number, "method": method, "params": params, **session})
        async with asyncio.timeout(SECONDS):
            return await answer

    async def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript; a promise is awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Return once an expression is true."""
        check = f"() => ({expression}) ? done() : setTimeout(check, 10)"
        await self.value(f"new Promise((done) => {{ const check = {check}; check(); }})")

    async def type(self, text: str) -> None:
        """Write into the field that has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key by its name and let it go."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        names: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **names, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    async def set_view(self, width: int, height: int, **features: str) -> None:
        """Set the size in CSS pixels, and media features as ``prefers_color_scheme="dark"``."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": width < 500}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=media)

    async def attach(self) -> None:
        """Open the page, and follow what it logs."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def listen(self) -> None:
        """Take the browser's messages until cancelled."""
        async for message in self._socket:
            body = message.json()
            if "id" in body:
                answer = self._answers.pop(body["id"])
                if "error" in body:
                    answer.set_exception(AssertionError(body["error"]))
                elif not answer.done():
                    answer.set_result(body["result"])
            elif body["method"] == "Log.entryAdded":
                self.problems.append(body["params"]["entry"]["text"])
            elif body["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(body["params"]["exceptionDetails"]))


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Page]:
    """Run a browser with an empty profile in a folder, and yield its page."""
    assert PROGRAM is not None
    # Its children may outlive it for a moment: they would hold a pipe open.
    process = await asyncio.create_subprocess_exec(
        PROGRAM, f"--user-data-dir={folder}", *OPTIONS, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
    )
    told = folder / "DevToolsActivePort"
    try:
        await until(lambda: told.exists() and told.read_text().count("\n"))
        port, path = (await asyncio.to_thread(told.read_text)).split()
        address = f"ws://127.0.0.1:{port}{path}"
        async with ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            try:
                await page.attach()
                yield page
            finally:
                # This closes the socket at once; the browser may take long to answer a close.
                os.killpg(process.pid, signal.SIGKILL)
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
