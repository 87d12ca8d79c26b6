"""From sampled tokens to what the client reads: text deltas, cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.router.stop_strings import StopMatcher
from quire.services.router.tokenizer import IncrementalDecoder, Tokenizer
from quire.services.router.validation import ValidRequest


@dataclass(slots=True)
class Delta:
    """What one message of a worker adds to the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    is_stopped: bool = False
    """A stop string is complete; the tokens after it are not part of the answer."""


class OutputAssembler:
    """Collects one request's tokens, over all of its attempts.

    Stop strings count only in the text of tokens after the first ``min_tokens``.
    """

    def __init__(self, request: ValidRequest, tokenizer: Tokenizer) -> None:
        self.token_ids: list[int] = []
        self._min_tokens = request.stopping.min_tokens
        self._wants_logprobs = request.num_logprobs is not None
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=not request.keep_special_tokens)
        self._matcher = StopMatcher(request.stop_strings)

    def add(self, tokens: Iterable[worker_pb2.SampledToken]) -> Delta:
        """Take the next tokens, up to the one that completes a stop string."""
        delta = Delta()
        for token in tokens:
            self.token_ids.append(token.token_id)
            delta.token_ids.append(token.token_id)
            if self._wants_logprobs:
                delta.logprobs.append(token.logprobs)
            text = self._decoder.step(token.token_id)
            if len(self.token_ids) <= self._min_tokens:
                delta.text += text
                continue
            fed = self._matcher.feed(text)
            delta.text += fed.text
            if fed.is_stopped:
                delta.is_stopped = True
                break
        return delta

    def flush(self) -> Delta:
        """Return the text that was held back, at the end of the tokens."""
        text = self._decoder.flush()
        if len(self.token_ids) <= self._min_tokens:
            return Delta(text)
        fed = self._matcher.feed(text)
        return Delta(
            fed.text if fed.is_stopped else fed.text + self._matcher.flush(), is_stopped=fed.is_stopped
        )
