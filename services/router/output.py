"""From sampled tokens to what the client reads: text deltas, cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.router.validation import ValidRequest
from quire.tokenization.stop_strings import StopMatcher
from quire.tokenization.tokenizer import IncrementalDecoder, Tokenizer


@dataclass(slots=True)
class Delta:
    """What one message of a worker adds to the answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    is_stopped: bool = False
    """A stop string is complete; the tokens after it are not part of the answer."""


class OutputAssembler:
    """Collects the tokens of one of a request's answers, over all attempts.

    Stop strings count only in the text of tokens after the first ``min_tokens``.
    """

    def __init__(self, request: ValidRequest, tokenizer: Tokenizer, index: int = 0) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        """Sum over the tokens, if the worker was asked for logprobs."""
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self._stopping = request.stopping
        self._min_tokens = request.stopping.min_tokens
        self._wants_logprobs = request.num_logprobs is not None
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=not request.keep_special_tokens)
        self._matcher = StopMatcher(request.stop_strings)

    def respond(self, output: worker_pb2.SequenceOutput) -> pb.GenerateStreamResponse:
        """Take what a worker sends and return what the client gets."""
        delta = self.add(output.tokens)
        text, is_stopped = delta.text, delta.is_stopped
        if output.finish_reason and not is_stopped:
            rest = self.flush()
            text, is_stopped = text + rest.text, rest.is_stopped
        self.finish_reason = pb.FINISH_REASON_STOP if is_stopped else output.finish_reason
        return pb.GenerateStreamResponse(
            index=self.index,
            text=text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            finish_reason=self.finish_reason,
            score=output.score if output.HasField("score") else None,
        )

    def implied_finish_reason(self, eos_token_ids: frozenset[int]) -> pb.FinishReason:
        """Return the finish reason that a lost worker had no time to send, if the tokens imply one."""
        stopping, tokens = self._stopping, self.token_ids
        if not tokens:
            return pb.FINISH_REASON_UNSPECIFIED
        stops = set(stopping.stop_token_ids)
        if not stopping.ignore_eos:
            stops |= eos_token_ids
        if tokens[-1] in stops and len(tokens) >= stopping.min_tokens:
            return pb.FINISH_REASON_STOP
        if len(tokens) >= stopping.max_tokens:
            return pb.FINISH_REASON_LENGTH
        return pb.FINISH_REASON_UNSPECIFIED

    def add(self, tokens: Iterable[worker_pb2.SampledToken]) -> Delta:
        """Take the next tokens, up to the one that completes a stop string."""
        delta = Delta()
        for token in tokens:
            self.token_ids.append(token.token_id)
            delta.token_ids.append(token.token_id)
            self.cumulative_logprob += token.logprobs.logprob
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
