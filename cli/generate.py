"""``quire generate``: one prompt, with one streamed answer or several complete ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.answer import format_stats, stream_answer
from quire.cli.failure import INTERRUPTED, describe, fail
from quire.cli.results import write
from quire.cli.sampling_options import BeamOptions, SamplingOptions
from quire.cli.spread import spread

if TYPE_CHECKING:
    from quire.client import Delta, GenerationOptions, Message, Prompt


def _option(flag: str, help: str, panel: str = "Sampling", **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, **more)


@dataclass(frozen=True)
class AnswerOptions:
    """The number and the form of answers."""

    n: Annotated[int | None, _option("--n", "Number of answers to sample.")] = None
    best_of: Annotated[
        int | None,
        _option(
            "--best-of",
            "Sample this many answers and return the most probable, or with --n the n most probable.",
        ),
    ] = None
    kv_budget: Annotated[
        int | None,
        _option(
            "--kv-budget",
            "Keep the keys and values of this many tokens at most: less memory, an approximate answer.",
        ),
    ] = None
    beam_width: Annotated[
        int | None,
        _option(
            "--beam-width", "Search for this many most probable answers instead of sampling.", "Beam search"
        ),
    ] = None
    stop: Annotated[list[str] | None, _option("--stop", "Stop at this text; may be repeated.")] = None
    json_schema: Annotated[
        Path | None,
        _option(
            "--json-schema", "File with a JSON schema that the answer follows.", exists=True, dir_okay=False
        ),
    ] = None
    regex: Annotated[str | None, _option("--regex", "Regular expression that the answer matches.")] = None

    def given(self) -> GenerationOptions:
        """Return the options by the names that the client has for them."""
        return {
            "n": self.n,
            "best_of": self.best_of,
            "kv_budget_tokens": self.kv_budget,
            "beam_width": self.beam_width,
            "stop": self.stop,
            "json_schema": _read(self.json_schema) if self.json_schema else None,
            "regex": self.regex,
        }


@spread
def generate(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, stdin is read.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message of a chat.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message; implies --chat.")] = None,
    stats: options.Stats = False,
    sampling: SamplingOptions,
    answers: AnswerOptions,
    beam: BeamOptions,
    connection: options.RouterConnection,
    encryption: options.ClientTls,
    model: options.ServedModel = None,
) -> None:
    """Continue one prompt and stream the answer to stdout; several answers are shown complete, by number."""
    from quire.client import Client, QuireError

    text = _read_prompt(prompt)
    chosen: GenerationOptions = {**sampling.given(), **answers.given(), **beam.given(), "model": model}
    several = Answers() if answers.beam_width or (answers.n or 1) > 1 else None
    with connection.client(Client, encryption.files()) as client:
        try:
            show = several.add if several else lambda delta: write(delta.text)
            answer = stream_answer(client, _to_prompt(text, chat, system), chosen, show)
        except QuireError as error:
            fail(describe(error, connection.address))
        except KeyboardInterrupt:
            write("\n")
            raise typer.Exit(INTERRUPTED) from None
    write(several.format() if several else "\n")
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


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error


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
