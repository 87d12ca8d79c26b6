"""``quire generate``: one prompt, one streamed answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli import options
from quire.cli.answer import format_stats, stream_answer
from quire.cli.failure import INTERRUPTED, describe, fail

if TYPE_CHECKING:
    from quire.client import GenerationOptions, Message, Prompt


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, stdin is read.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message of a chat.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")] = None,
    stats: options.Stats = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    address: options.Address = options.DEFAULT_ADDRESS,
    model: options.ServedModel = None,
    timeout: options.Timeout = 300.0,
) -> None:
    """Continue one prompt and stream the answer to stdout."""
    from quire.client import Client, QuireError

    text = _read_prompt(prompt)
    sampling: GenerationOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "model": model,
    }
    with Client(address, timeout=timeout) as client:
        try:
            answer = stream_answer(client, _to_prompt(text, chat, system), sampling, _write)
        except QuireError as error:
            fail(describe(error, address))
        except KeyboardInterrupt:
            _write("\n")
            raise typer.Exit(INTERRUPTED) from None
    _write("\n")
    if stats:
        typer.echo(format_stats(answer), err=True)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, or pipe one into stdin")
    return sys.stdin.read()


def _to_prompt(text: str, chat: bool, system: str | None) -> Prompt:
    if not chat and system is None:
        return text
    messages: list[Message] = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
