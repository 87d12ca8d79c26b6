"""``quire chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli import options
from quire.cli.answer import TimedAnswer, format_stats, stream_answer
from quire.cli.failure import describe
from quire.cli.results import write
from quire.cli.sampling_options import SamplingOptions
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.client import Client, GenerationOptions, Message

HELP = (
    "/reset forgets the conversation, /stats describes the last answer, /quit ends. Ctrl-C stops an answer."
)


@spread
def chat(
    *,
    system: Annotated[str | None, typer.Option("--system", help="System message of the chat.")] = None,
    stats: options.Stats = False,
    sampling: SamplingOptions,
    connection: options.RouterConnection,
    encryption: options.ClientTls,
    model: options.ServedModel = None,
) -> None:
    """Talk to the model. From a pipe, each line of stdin is one turn.

    /reset forgets the conversation, /stats shows statistics of the last answer, /quit or Ctrl-D ends the
    chat. Ctrl-C stops the answer that is being written; at the prompt it ends the chat.
    """
    from quire.client import Client

    chosen: GenerationOptions = {**sampling.given(), "model": model}
    is_interactive = sys.stdin.isatty()
    with connection.client(Client, encryption.files()) as client:
        conversation = Conversation(client, chosen, connection.address, system, with_stats=stats)
        if is_interactive:
            # Importing readline gives input() a line editor with history.
            import readline  # noqa: F401

            typer.echo(HELP, err=True)
        conversation.run(_ask if is_interactive else _read_line)
    if conversation.num_failures and not is_interactive:
        raise typer.Exit(1)


class Conversation:
    """A chat: its history, and the loop that reads turns and writes answers."""

    def __init__(
        self,
        client: Client,
        sampling: GenerationOptions,
        address: str,
        system: str | None,
        *,
        with_stats: bool,
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._address = address
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._with_stats = with_stats
        self._last: TimedAnswer | None = None
        self.num_failures = 0

    def run(self, read_turn: Callable[[], str | None]) -> None:
        """Answer turns until there are no more."""
        while (turn := read_turn()) is not None and turn != "/quit":
            if turn == "/reset":
                self._messages = list(self._start)
            elif turn == "/stats":
                self._print_stats()
            elif turn.startswith("/"):
                _print_note(HELP)
            elif turn:
                self._answer(turn)

    def _answer(self, turn: str) -> None:
        from quire.client import QuireError

        asked: list[Message] = [*self._messages, {"role": "user", "content": turn}]
        try:
            self._last = stream_answer(self._client, asked, self._sampling, lambda delta: write(delta.text))
        except QuireError as error:
            self.num_failures += 1
            _print_note(f"error: {describe(error, self._address)}")
        except KeyboardInterrupt:
            write("\n")
            _print_note("[stopped; this turn is forgotten]")
        else:
            write("\n")
            self._messages = [*asked, {"role": "assistant", "content": self._last.text}]
            if self._with_stats:
                self._print_stats()

    def _print_stats(self) -> None:
        _print_note("no answer yet" if self._last is None else format_stats(self._last))


def _ask() -> str | None:
    """Return a line typed at the prompt, or None at Ctrl-C or Ctrl-D."""
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None


def _read_line() -> str | None:
    """Return the next line of stdin, or None at its end."""
    line = sys.stdin.readline()
    return line.strip() if line else None


def _print_note(text: str) -> None:
    typer.echo(text, err=True)
