"""``quire generate``: one prompt, with one streamed answer or several complete ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli import options
from quire.cli.answer import format_stats, stream_answer
from quire.cli.failure import INTERRUPTED, describe, fail
from quire.cli.results import write
from quire.cli.sampling_options import BeamOptions, SamplingOptions
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.client import Delta, GenerationOptions, Message, Prompt


@spread
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, stdin is read.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message of a chat.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")] = None,
    stats: options.Stats = False,
    sampling: SamplingOptions,
    n: options.NumAnswers = None,
    best_of: options.BestOf = None,
    kv_budget: options.KvBudget = None,
    beam_width: options.BeamWidth = None,
    beam: BeamOptions,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    address: options.Address = options.DEFAULT_ADDRESS,
    api_key: options.ApiKey = None,
    encryption: options.ClientTls,
    model: options.ServedModel = None,
    timeout: options.Timeout = 300.0,
) -> None:
    """Continue one prompt and stream the answer to stdout; several answers are shown complete, by number."""
    from quire.client import Client, QuireError

    text = _read_prompt(prompt)
    chosen: GenerationOptions = {
        **sampling.given(),
        "n": n,
        "best_of": best_of,
        "kv_budget_tokens": kv_budget,
        "beam_width": beam_width,
        **beam.given(),
        "stop": stop,
        "json_schema": json_schema.read_text("utf-8") if json_schema else None,
        "regex": regex,
        "model": model,
    }
    answers = Answers() if beam_width or (n or 1) > 1 else None
    tls = encryption.files()
    with Client(address.split(","), timeout=timeout, api_key=api_key, tls=tls) as client:
        try:
            show = answers.add if answers else lambda delta: write(delta.text)
            answer = stream_answer(client, _to_prompt(text, chat, system), chosen, show)
        except QuireError as error:
            fail(describe(error, address))
        except KeyboardInterrupt:
            write("\n")
            raise typer.Exit(INTERRUPTED) from None
    write(answers.format() if answers else "\n")
    if stats:
        typer.echo(format_stats(answer), err=True)


class Answers:
    """Collects several answers whose steps arrive interleaved."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._scores: dict[int, float] = {}

    def add(self, delta: Delta) -> None:
        """Add one step to its answer."""
        self._texts[delta.index] = self._texts.get(delta.index, "") + delta.text
        if delta.score is not None:
            self._scores[delta.index] = delta.score

    def format(self) -> str:
        """Return all answers as text, each under its number and its score if it has one."""
        return "".join(f"{self._heading(index)}\n{self._texts[index]}\n" for index in sorted(self._texts))

    def _heading(self, index: int) -> str:
        score = self._scores.get(index)
        return f"[{index}]" if score is None else f"[{index}] score {score:.4f}"


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
