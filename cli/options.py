"""Options that more than one verb has. A setting comes from its flag, then its variable, then the default."""

from __future__ import annotations

from typing import Annotated, Any

import typer

ENV_PREFIX = "QUIRE_"
DEFAULT_ADDRESS = "127.0.0.1:8500"


def variable(flag: str) -> str:
    """Return the environment variable of a flag: ``--max-num-seqs`` is ``QUIRE_MAX_NUM_SEQS``."""
    return ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def setting(flag: str, help: str, panel: str, **more: Any) -> Any:
    """Return an option that has an environment variable."""
    return typer.Option(flag, help=help, rich_help_panel=panel, envvar=variable(flag), **more)


Address = Annotated[str, setting("--address", "host:port of the router's public gRPC.", "Connection")]
Timeout = Annotated[
    float, setting("--timeout", "Deadline of an answer, in seconds.", "Connection", min=0.001)
]
ServedModel = Annotated[
    str | None, typer.Option("--model", help="Name of the served model.", rich_help_panel="Connection")
]

MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        help="Most tokens to generate; by default up to the model's length.",
        rich_help_panel="Sampling",
    ),
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy.", rich_help_panel="Sampling")
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Nucleus probability.", rich_help_panel="Sampling")
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="Keep the k most probable tokens.", rich_help_panel="Sampling")
]
MinP = Annotated[
    float | None,
    typer.Option(
        "--min-p", help="Keep tokens at least this share as probable as the best.", rich_help_panel="Sampling"
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Same seed, same tokens.", rich_help_panel="Sampling")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Stop at this text; may be repeated.", rich_help_panel="Sampling"),
]
Stats = Annotated[
    bool, typer.Option("--stats", help="Print timings and where the KV blocks came from, to stderr.")
]
