"""What calls of ``LLM`` return or raise; the names of the results are those of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from quire.engine.errors import RequestFailedError


class Logprob(NamedTuple):
    """The logprob of one token at one position.

    Attributes:
        logprob: natural logarithm of the token's probability in the model's own distribution.
        rank: 1 for the most probable token; None if the token is not among the top tokens asked for.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt.

    Attributes:
        index: index of the answer among those of its request.
        text: the answer's text, without the stop string unless ``include_stop_str_in_output`` is set.
        token_ids: the generated tokens, including the stop token or the tokens of the stop string.
        finish_reason: "stop" (the model's end, a stop token, a stop string) or "length".
        stop_reason: the stop string or stop token that ended the answer; None at the model's own end.
        cumulative_logprob: sum over the tokens; None if neither logprobs nor ``best_of`` were asked for.
        logprobs: for each position, the logprobs of the generated token and of the top tokens, by id.
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
        prompt: the prompt's text; None if it was given as token ids.
        outputs: the answers in the order of their index; those of a beam search or ``best_of``, best first.
        num_cached_tokens: number of prompt tokens that were found in the prefix cache.
        prompt_logprobs: for each prompt position, the logprobs of its token and of the top tokens, by id;
            None for the first position.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class EngineStats(NamedTuple):
    """Counts since the start, and the present state of the block pool.

    Attributes:
        num_cached_tokens: prompt tokens that were found in the prefix cache and not computed.
        num_swapped: preemptions after which the request's blocks were copied back.
        num_recomputed: preemptions after which the request's blocks were recomputed.
        num_draft_tokens: draft tokens that were proposed.
        num_accepted_tokens: draft tokens that were accepted.
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


class RequestsFailedError(RuntimeError):
    """Some prompts of a call have no answer; the message has the reason of the first of them.

    Attributes:
        outputs: for each prompt, its answers or the error that prevented them.
    """

    def __init__(self, outputs: Sequence[RequestOutput | RequestFailedError]) -> None:
        self.outputs = list(outputs)
        failed = [(at, each) for at, each in enumerate(outputs) if isinstance(each, RequestFailedError)]
        at, error = failed[0]
        super().__init__(f"prompts[{at}]: {error} ({len(failed)} of {len(outputs)} prompts failed)")

    def __reduce__(self) -> tuple[type[RequestsFailedError], tuple[Any, ...]]:
        """Let another process make the same error, which ``BaseException`` would give only the message."""
        return type(self), (self.outputs,)
