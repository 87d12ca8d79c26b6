"""What comes back; the names are those of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Logprob(NamedTuple):
    """One candidate at one position.

    Attributes:
        logprob: natural logarithm of its probability, of the model's own distribution.
        rank: 1 for the most probable token; None if it is not among those asked for.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer.

    Attributes:
        index: which of the request's answers it is.
        text: without the stop string, if one ended it.
        token_ids: what was generated, the stop token or the stop string's tokens included.
        finish_reason: "stop" (the model's end, a stop token, a stop string) or "length".
        stop_reason: the stop string or stop token that ended it; None at the model's own end.
        cumulative_logprob: sum over the tokens; None if neither logprobs nor ``best_of`` were asked for.
        logprobs: for each token, it and the most probable ones by id.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
        prompt: its text; None if it was given as token ids.
        outputs: in the order of their index; those of a beam search or of ``best_of``, the best first.
        num_cached_tokens: how many of its tokens were found in the prefix cache.
        prompt_logprobs: for each prompt token, it and the most probable ones; the first has no logprobs.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class EngineStats(NamedTuple):
    """Counts since the start, and the block pool as it is now.

    Attributes:
        num_cached_tokens: of the prompt tokens, those that were not computed.
        num_swapped: how often a request gave up its blocks for others, and had them copied back.
        num_recomputed: how often they were computed again instead.
        num_draft_tokens: guessed tokens.
        num_accepted_tokens: of those, the right ones.
    """

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_swapped: int
    num_recomputed: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_free_blocks: int
    num_cached_blocks: int
    num_used_blocks: int
