"""Turns sampled tokens into the messages that the client reads: text deltas, cut at a stop string."""

from __future__ import annotations

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.sampling.params import StoppingParams
from quire.services.requests.validation import ValidRequest
from quire.tokenization.stopping_decoder import StoppingDecoder
from quire.tokenization.tokenizer import Tokenizer


class OutputAssembler:
    """Collects the tokens of one answer of a request, over all attempts."""

    def __init__(self, request: ValidRequest, tokenizer: Tokenizer, index: int = 0) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        """Sum of the tokens' logprobs; stays 0 if the worker was not asked for logprobs."""
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self._stopping: StoppingParams = request.params
        self._wants_logprobs = request.response.logprobs is not None
        self._decoder = StoppingDecoder(
            tokenizer,
            request.response.stop_strings,
            min_tokens=request.params.min_tokens,
            skip_special_tokens=not request.response.keep_special_tokens,
            keep_stop_string=request.response.keep_stop_string,
        )

    def respond(self, output: worker_pb2.SequenceOutput) -> pb.GenerateStreamResponse:
        """Return the client's message for a worker's output, without anything after a stop string."""
        response = pb.GenerateStreamResponse(
            index=self.index, score=output.score if output.HasField("score") else None
        )
        is_stopped = False
        for token in output.tokens:
            is_stopped = self._add(token, response)
            if is_stopped:
                break
        if output.finish_reason and not is_stopped:
            rest = self._decoder.flush()
            response.text += rest.text
            is_stopped = rest.is_stopped
        self.finish_reason = pb.FINISH_REASON_STOP if is_stopped else output.finish_reason
        response.finish_reason = self.finish_reason
        return response

    def _add(self, token: worker_pb2.SampledToken, response: pb.GenerateStreamResponse) -> bool:
        """Add a token to the answer and to ``response``; return whether it completes a stop string."""
        self.token_ids.append(token.token_id)
        self.cumulative_logprob += token.logprobs.logprob
        response.token_ids.append(token.token_id)
        if self._wants_logprobs:
            response.logprobs.append(token.logprobs)
        shown = self._decoder.step(token.token_id)
        response.text += shown.text
        return shown.is_stopped

    def implied_finish_reason(self, eos_token_ids: frozenset[int]) -> pb.FinishReason:
        """Return the finish reason that the tokens imply, for a worker that was lost before it sent one.

        Return ``FINISH_REASON_UNSPECIFIED`` if the answer has not finished.
        """
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
