"""Counts the tokens of a request over all its prompts."""

from __future__ import annotations

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.answer_bodies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
    Work,
)

_WORK = tuple(name for name in Work.model_fields if name != "workers")
_SUMS = ("completion_tokens", "reasoning_tokens", "cached_prompt_tokens", *_WORK)


class UsageCount:
    """Adds up the token counts in the messages of several streams.

    Args:
        is_read_only: the request wants only its prompt, so no completion tokens are counted.
    """

    def __init__(self, *, is_read_only: bool = False) -> None:
        self._is_read_only = is_read_only
        self._prompt_tokens = 0
        self._seen_tokens = 0
        self._final = pb.Usage()

    def add(self, response: pb.GenerateStreamResponse) -> None:
        """Add the counts of the next message."""
        self._prompt_tokens += response.prompt_tokens
        self._seen_tokens += len(response.token_ids)
        if not response.HasField("usage"):
            return  # only the last message of a stream has one
        total, usage = self._final, response.usage
        for name in _SUMS:
            setattr(total, name, getattr(total, name) + getattr(usage, name))
        total.workers.extend(label for label in usage.workers if label not in total.workers)

    def so_far(self) -> Usage:
        """Return the counts in the middle of a stream; the number of cached tokens is not known yet."""
        return self._usage(self._seen_tokens)

    def final(self) -> Usage:
        """Return the counts at the end."""
        usage = self._usage(self._final.completion_tokens)
        usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=self._final.cached_prompt_tokens)
        reasoning_tokens = self._final.reasoning_tokens
        usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
        counts = {name: getattr(self._final, name) for name in _WORK}
        usage.work = Work(workers=list(self._final.workers), **counts)
        return usage

    def _usage(self, completion_tokens: int) -> Usage:
        if self._is_read_only:
            completion_tokens = 0
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
        )
