"""``quire generate`` against a server on the loopback."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from quire.cli.answer import TimedAnswer, format_stats
from quire.client import Usage
from quire.protos import inference_pb2 as pb
from quire.rpc import errors as service_errors
from quire.sampling.parameter import table
from quire.sampling.params import SamplingParams

Quire = Callable[..., Result]


def test_the_answer_is_all_of_stdout(quire: Quire, fake_generation: Any) -> None:
    result = quire("generate", "What?", "--address", fake_generation.address, "--max-tokens", "7")
    assert (result.exit_code, result.stdout) == (0, "Blue is é🙂.\n")
    assert result.stderr == ""
    (sent,) = fake_generation.requests
    assert (sent.text, sent.stopping.max_tokens) == ("What?", 7)
    assert not sent.sampling.HasField("temperature")


def test_characters_that_the_terminal_lacks_are_escaped(command: list[str], fake_generation: Any) -> None:
    run = subprocess.run(
        [*command, "generate", "What?", "--address", fake_generation.address],
        env={**os.environ, "PYTHONIOENCODING": "iso-8859-1"},
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert (run.stdout, run.stderr) == (b"Blue is \xe9\\U0001f642.\n", b"")


def test_a_full_disk_ends_the_command_with_one_line(command: list[str], fake_generation: Any) -> None:
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [*command, "generate", "What?", "--address", fake_generation.address],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert (run.returncode, run.stderr) == (1, b"error: cannot write: No space left on device\n")


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_every_parameter_with_a_help_text_has_an_option(
    quire: Quire, fake_generation: Any, verb: str
) -> None:
    entries = [entry for entry in table(SamplingParams).values() if entry.parameter.help]
    values = {entry.name: "0.5" if entry.type is float else "3" for entry in entries}
    options = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert "--typical-p" in options
    assert quire(verb, "--address", fake_generation.address, *options, stdin="What?").exit_code == 0
    (sent,) = fake_generation.requests
    for entry in entries:
        group, _, field = entry.parameter.path.partition(".")
        assert getattr(getattr(sent, group), field) == float(values[entry.name])


def test_stdin_gives_the_prompt(quire: Quire, fake_generation: Any) -> None:
    assert quire("generate", "--address", fake_generation.address, stdin="line 1\nline 2").exit_code == 0
    assert fake_generation.requests[0].text == "line 1\nline 2"


def test_chat_uses_the_template(quire: Quire, fake_generation: Any) -> None:
    quire("generate", "Hi", "--address", fake_generation.address, "--chat")
    quire("generate", "Hi", "--address", fake_generation.address, "--system", "Be brief.")
    roles = [[each.role for each in sent.chat.messages] for sent in fake_generation.requests]
    assert roles == [["user"], ["system", "user"]]


def test_several_answers_are_numbered(quire: Quire, fake_generation: Any) -> None:
    result = quire("generate", "Hi", "--address", fake_generation.address, "--n", "2")
    assert result.stdout == "[0]\nBlue is é🙂.\n[1]\nBlue is é🙂.\n"
    search = ("--beam-width", "2", "--length-penalty", "0.5", "--early-stopping", "never")
    result = quire("generate", "Hi", "--address", fake_generation.address, *search)
    assert result.stdout == "[0] score -0.5000\nBlue is é🙂.\n[1] score -1.5000\nBlue is é🙂.\n"
    beam = fake_generation.requests[1].sampling.beam
    assert (beam.width, beam.length_penalty, beam.early_stopping) == (2, 0.5, pb.EARLY_STOPPING_IMPOSSIBLE)


def test_stats_go_to_stderr(quire: Quire, fake_generation: Any) -> None:
    result = quire("generate", "Hi", "--address", fake_generation.address, "--stats")
    assert result.stdout == "Blue is é🙂.\n"
    assert "prompt 40 tokens, 32 cached" in result.stderr
    assert "1 blocks (64.0 KiB) shipped, 2 already there" in result.stderr


@pytest.mark.parametrize("options", [("--beam-width", "2"), ("--best-of", "2")])
def test_stats_of_whole_answers_have_no_speed(
    quire: Quire, fake_generation: Any, options: tuple[str, ...]
) -> None:
    result = quire("generate", "Hi", "--address", fake_generation.address, "--stats", *options)
    assert " tokens · prompt " in result.stderr


def test_a_schema_that_is_no_text_is_a_usage_error(
    quire: Quire, fake_generation: Any, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_bytes(b"\xff")
    result = quire("generate", "Hi", "--address", fake_generation.address, "--json-schema", str(schema))
    assert (result.exit_code, "cannot be read" in result.output) == (2, True)


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_stream_is_an_empty_one(command: list[str], fake_generation: Any, closed: str) -> None:
    words = [*command, "generate", "--address", fake_generation.address, *(() if "<" in closed else ("Hi",))]
    run = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *words], capture_output=True, timeout=30, check=False
    )
    assert b"Traceback" not in run.stderr
    assert run.returncode == 0


def test_the_environment_gives_the_address(
    quire: Quire, fake_generation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ADDRESS", fake_generation.address)
    assert quire("generate", "Hi").exit_code == 0


def test_errors_name_the_remedy(quire: Quire, fake_generation: Any) -> None:
    fake_generation.errors = [
        service_errors.InvalidArgument("max_tokens", "is 9999, the model takes 512"),
        service_errors.ResourceExhausted("the queue is full", retry_after_seconds=2),
    ]
    invalid = quire("generate", "Hi", "--address", fake_generation.address)
    assert (invalid.exit_code, invalid.stderr) == (1, "error: max_tokens: is 9999, the model takes 512\n")
    full = quire("generate", "Hi", "--address", fake_generation.address)
    assert (full.exit_code, full.stderr) == (1, "error: the queue is full (try again in 2 s)\n")
    result = quire("generate", "Hi", "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no server answers at 127.0.0.1:1" in result.stderr


@pytest.mark.parametrize(
    ("num_tokens", "num_later", "shown"),
    [(1, 0, "1 token"), (5, 0, "5 tokens"), (5, 4, "5 tokens at 8.0 tokens/s")],
)
def test_stats_have_a_speed_if_tokens_came_after_the_first_message(
    num_tokens: int, num_later: int, shown: str
) -> None:
    usage = Usage(
        prompt_tokens=5,
        completion_tokens=num_tokens,
        cached_prompt_tokens=0,
        blocks_shipped=0,
        bytes_shipped=0,
        blocks_reused_on_decode=0,
        retries=1,
        blocks_pulled=3,
        bytes_pulled=3072,
    )
    line = format_stats(TimedAnswer("x", usage, 0.0124, e2e_seconds=0.5124, num_later_tokens=num_later))
    assert line.startswith(f"TTFT 12 ms · {shown} · prompt ")
    assert " · 3 blocks (3.0 KiB) pulled · " in line
    assert line.endswith(" · 1 retry")
