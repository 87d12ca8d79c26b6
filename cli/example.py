"""The question that ``quire serve --example`` asks, so that a first start shows an answer."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, cast

import typer

from quire.cli.answer import format_stats, stream_answer
from quire.cli.options import ClientTls
from quire.cli.results import write
from quire.models import notes
from quire.settings.setting import variable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.client import GenerationOptions, Message

NUM_NOTES = 12


def ask_example(address: str) -> None:
    """Ask a question about notes at ``address`` and stream the answer to stdout; a failure is only reported.

    Key and certificates come from the same variables as for other commands, such as QUIRE_API_KEY and
    QUIRE_TLS_CA.
    """
    from quire.client import Client, QuireError

    (example,) = notes.held_out(1, NUM_NOTES)
    messages = cast("Sequence[Message]", example.messages)
    sampling: GenerationOptions = {"max_tokens": 64, "temperature": 0.0}
    try:
        write(f"\n> {messages[-1]['content']}\n")
        tls = ClientTls.from_environment().files()
        with Client(address, api_key=os.environ.get(variable("--api-key")), tls=tls) as client:
            answer = stream_answer(client, messages, sampling, lambda delta: write(delta.text))
        write(f"\n  {format_stats(answer)}\n\n")
        write(f"Serving at {address}; Ctrl-C ends. Talk to it: {sys.argv[0]} chat --address {address}\n")
    except (QuireError, OSError, ValueError, typer.BadParameter) as error:
        typer.echo(f"the example failed: {error}", err=True)
