"""What goes into a call and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Plain text, token ids, or a conversation that the server renders with the model's chat template."""


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of every generating call. Absent or ``None``: the server's default."""

    max_tokens: int | None
    """Most tokens to generate; by default up to the model's length."""
    min_tokens: int | None
    """Fewest tokens before a stop condition counts."""
    temperature: float | None
    """0 is greedy; default 1."""
    top_p: float | None
    """Nucleus probability in (0, 1]."""
    top_k: int | None
    """Keep the k most probable tokens; 0 is off."""
    min_p: float | None
    """Keep tokens at least this share as probable as the best."""
    seed: int | None
    """Same seed, same tokens."""
    stop: str | Sequence[str] | None
    """Stop when the text contains one of these; it is not returned."""
    stop_token_ids: Sequence[int] | None
    """Stop after one of these token ids."""
    ignore_eos: bool | None
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None
    """Return this many top logprobs at each position; 0 returns the drawn token's alone."""
    keep_special_tokens: bool | None
    """Keep special tokens in the returned text."""
    model: str | None
    """Name of the served model; by default the only one."""
    request_id: str | None
    """Name of the request in the server's logs."""


FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the most probable tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a drawn token, and the most probable ones, best first."""

    logprob: float
    top: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one request, and where its KV blocks came from."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int
    """Prompt tokens whose KV was not computed for this request."""
    blocks_shipped: int
    """Blocks sent from the prefill to the decode worker."""
    bytes_shipped: int
    blocks_reused_on_decode: int
    """Prompt blocks the decode worker already held, so that they were not sent."""
    retries: int
    """Times the request moved to another worker after a failure."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token if asked for, otherwise empty."""
    request_id: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of a streamed answer."""

    text: str
    """New text; may be empty while a character or a stop string is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    """Set on the last delta alone."""
    usage: Usage | None
    """Set on the last delta alone."""
    request_id: str
    """Set on the first delta alone."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and its limits."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_prefill_workers: int
    num_decode_workers: int
