"""What goes into a call and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict


class Message(TypedDict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Plain text, token ids, or a conversation that the server renders with the model's chat template."""


EarlyStopping: TypeAlias = Literal[True, False, "never"]


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
    n: int | None
    """Answers to draw side by side; number i is what a request alone gets with the seed + i."""
    best_of: int | None
    """Draw this many answers; at the end, return the ``n`` with the highest logprobs, the best first."""
    kv_budget_tokens: int | None
    """Keep the keys and values of this many tokens once the prompt is computed: an approximation."""
    beam_width: int | None
    """Search for this many most probable answers instead of drawing them."""
    length_penalty: float | None
    """Of a beam search: an answer's score is its logprob divided by its length to this power; default 1."""
    early_stopping: EarlyStopping | None
    """Of a beam search: True ends it with ``beam_width`` answers, False (the default) when the present beams
    are unlikely to beat them, "never" when they cannot."""
    presence_penalty: float | None
    """Subtracted from the logits of tokens that the answer has, from -2 to 2."""
    frequency_penalty: float | None
    """Subtracted from a token's logit for each time that the answer has it, from -2 to 2."""
    repetition_penalty: float | None
    """Divides the logits of tokens that the prompt or the answer has; above 0, 1 is off."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of these token ids, from -100 to 100."""
    allowed_token_ids: Sequence[int] | None
    """The only tokens that may be drawn."""
    bad_words: Sequence[str] | None
    """Texts that are never generated."""
    bad_word_token_ids: Sequence[Sequence[int]] | None
    """Token ids in a row that are never generated."""
    stop: str | Sequence[str] | None
    """Stop when the text contains one of these; it is not returned."""
    stop_token_ids: Sequence[int] | None
    """Stop after one of these token ids."""
    ignore_eos: bool | None
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None
    """Return this many top logprobs at each position; 0 returns the drawn token's alone."""
    json_schema: str | Mapping[str, Any] | None
    """The answer is a JSON value that this schema accepts."""
    regex: str | None
    """The whole answer matches this regular expression."""
    grammar: str | None
    """The answer follows this grammar in Lark's notation."""
    prompt_logprobs: int | None
    """Return this many top logprobs at each position of the prompt; such a prompt uses no prefix cache."""
    keep_special_tokens: bool | None
    """Keep special tokens in the returned text."""
    keep_stop_string: bool | None
    """End the text with the stop string that was found."""
    model: str | None
    """Name of the served model; by default the only one."""
    request_id: str | None
    """Name of the request in the server's logs."""
    cache_salt: str | None
    """Requests with different salts share no KV blocks; by default the tenant's requests all do."""


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
    blocks_pulled: int = 0
    """Blocks copied from another worker's cache instead of computed."""
    bytes_pulled: int = 0
    accepted_draft_tokens: int = 0
    """Generated tokens that were guessed and came in one step with the token before them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's answers."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token if asked for, otherwise empty."""
    score: float | None = None
    """A beam search's: the logprob, divided by the length to the power of the length penalty."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers to a prompt; ``text`` and the other properties are those of the first."""

    choices: tuple[Choice, ...]
    """At least one, in the order of their index; a beam search's are the best first."""
    usage: Usage
    """Of all answers together."""
    request_id: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each prompt token but the first, if asked for."""

    @property
    def text(self) -> str:
        """The generated text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why generation stopped."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One for each token if asked for, otherwise empty."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """One step of one streamed answer. A beam search's answers come whole, at its end."""

    text: str
    """New text; may be empty while a character or a stop string is incomplete."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    """Set on the answer's last delta alone."""
    usage: Usage | None
    """Set on the request's last delta alone."""
    request_id: str
    """Set on the first delta alone."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each prompt token but the first, if asked for; on the first delta alone."""
    index: int = 0
    """Which of the request's answers it is about."""
    score: float | None = None
    """A beam search's answer: its score."""


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
