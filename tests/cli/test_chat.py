"""``quire chat``: driven by a pipe and, as people do, by a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from typer.testing import Result

from quire.rpc import errors as service_errors

Quire = Callable[..., Result]
WAIT_SECONDS = 20.0


def _contents(request: Any) -> list[str]:
    return [message.content for message in request.chat.messages]


def test_each_line_is_a_turn_and_history_grows(quire: Quire, fake_generation: Any) -> None:
    result = quire(
        "chat", "--address", fake_generation.address, "--system", "Be brief.", stdin="One\n\nTwo\n"
    )
    assert (result.exit_code, result.stdout) == (0, "Blue is é🙂.\n" * 2)
    first, second = fake_generation.requests
    assert _contents(first) == ["Be brief.", "One"]
    assert _contents(second) == ["Be brief.", "One", "Blue is é🙂.", "Two"]


def test_reset_forgets_and_quit_ends(quire: Quire, fake_generation: Any) -> None:
    quire("chat", "--address", fake_generation.address, stdin="One\n/reset\nTwo\n/quit\nThree\n")
    assert [_contents(each) for each in fake_generation.requests] == [["One"], ["Two"]]


def test_stats_follow_each_answer_or_the_command(quire: Quire, fake_generation: Any) -> None:
    each = quire("chat", "--address", fake_generation.address, "--stats", stdin="One\nTwo\n")
    assert each.stderr.count("TTFT") == 2
    asked = quire("chat", "--address", fake_generation.address, stdin="/stats\nOne\n/stats\n/what\n")
    assert asked.stderr.count("TTFT") == 1
    assert "no answer yet" in asked.stderr
    assert "/reset forgets" in asked.stderr


def test_a_failed_turn_is_forgotten_and_reported(quire: Quire, fake_generation: Any) -> None:
    fake_generation.errors = [service_errors.ResourceExhausted("the queue is full")]
    result = quire("chat", "--address", fake_generation.address, stdin="One\nTwo\n")
    assert result.exit_code == 1
    assert "error: the queue is full" in result.stderr
    assert _contents(fake_generation.requests[-1]) == ["Two"]


class Terminal:
    """A process on a terminal."""

    def __init__(self, command: list[str]) -> None:
        self._end, other = pty.openpty()
        # A session of its own, with the terminal as its controlling one: then Ctrl-C is a signal.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command], stdin=other, stdout=other, stderr=other, close_fds=True
        )
        os.close(other)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def expect(self, text: str) -> None:
        """Read until ``text`` appears."""
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self._seen:
            assert select.select([self._end], [], [], deadline - time.monotonic())[0], self._seen
            self._seen += os.read(self._end, 4096).decode()
        self._seen = self._seen.partition(text)[2]

    def interrupt_until_ended(self) -> int:
        """Press Ctrl-C until the process ends: the line editor misses one that comes as it starts to wait."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            self.type("\x03")
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(5)
        raise AssertionError("the process goes on")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_SECONDS)
        os.close(self._end)


@pytest.fixture
def terminal(command: list[str], fake_generation: Any) -> Iterator[Terminal]:
    terminal = Terminal([*command, "chat", "--address", fake_generation.address])
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_then_the_chat(terminal: Terminal, fake_generation: Any) -> None:
    fake_generation.hangs = True
    terminal.expect("> ")
    terminal.type("One\n")
    terminal.expect("Blue")
    terminal.type("\x03")
    assert fake_generation.cancelled.wait(WAIT_SECONDS)
    terminal.expect("[stopped; this turn is forgotten]")
    fake_generation.hangs = False
    terminal.expect("> ")
    terminal.type("Two\n")
    terminal.expect("é🙂.")
    assert _contents(fake_generation.requests[-1]) == ["Two"]
    terminal.expect("> ")
    assert terminal.interrupt_until_ended() == 0


def test_ctrl_d_ends_the_chat(terminal: Terminal) -> None:
    terminal.expect("> ")
    terminal.type("\x04")
    assert terminal.process.wait(WAIT_SECONDS) == 0
