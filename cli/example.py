"""The question that ``quire serve --example`` asks, so that a first start shows an answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from quire.cli.answer import format_stats, stream_answer

if TYPE_CHECKING:
    from quire.client import Message

NOTES = (
    "Here are some notes. The red box holds a lamp. The blue box holds a clock. The green box holds a spoon."
)
QUESTION = "What does the blue box hold?"


def ask_example(address: str) -> None:
    """Ask the example's question at ``address`` and stream the answer to stdout; a failure is only told."""
    from quire.client import Client, QuireError

    messages: list[Message] = [{"role": "user", "content": f"{NOTES}\n{QUESTION}"}]
    _write(f"\n{NOTES}\n> {QUESTION}\n")
    with Client(address) as client:
        try:
            answer = stream_answer(client, messages, {"max_tokens": 64, "temperature": 0.0}, _write)
        except QuireError as error:
            typer.echo(f"the example failed: {error.message}", err=True)
            return
    _write(f"\n  {format_stats(answer)}\n\n")
    typer.echo(f"Serving at {address}. Talk to it: quire chat --address {address}   (Ctrl-C ends)")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
