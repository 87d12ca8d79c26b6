"""Turns a worker's tokens into the messages of ``vllm.grpc.engine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from quire.protos import inference_pb2, worker_pb2
from quire.services.requests.validation import ValidRequest
from quire.tokenization.stopping_decoder import StoppingDecoder
from quire.tokenization.tokenizer import Tokenizer

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}


class AnswerWriter:
    """One answer of a request: collects its tokens, and ends it at a stop string."""

    def __init__(self, request: ValidRequest, tokenizer: Tokenizer, index: int) -> None:
        self.num_cached_tokens = 0
        self.prompt_logprobs: Sequence[inference_pb2.TokenLogprobs] = ()
        self.hand_off: str | None = None
        self.is_finished = False
        self._request = request
        self._index = index
        self._tokens: list[worker_pb2.SampledToken] = []
        self._num_sent = 0
        self._finish_reason = inference_pb2.FINISH_REASON_UNSPECIFIED
        self._stop_string: str | None = None
        # The text is needed only to find stop strings.
        self._decoder = _decoder(request, tokenizer) if request.response.stop_strings else None

    def add(
        self, tokens: Sequence[worker_pb2.SampledToken], finish_reason: inference_pb2.FinishReason
    ) -> None:
        """Add the tokens that a step sampled; tokens after a stop string are left out of the answer."""
        for token in tokens:
            self._tokens.append(token)
            if self._decoder is not None and (stop := self._decoder.step(token.token_id).stop):
                self._end_at(stop)
                return
        if not finish_reason:
            return
        self._finish_reason, self.is_finished = finish_reason, True
        if self._decoder is not None and (stop := self._decoder.flush().stop):
            self._end_at(stop)

    def chunk(self) -> vllm.GenerateResponse:
        """Return a message with the tokens since the last chunk."""
        is_first, tokens = not self._num_sent, self._tokens[self._num_sent :]
        self._num_sent = len(self._tokens)
        chunk = vllm.GenerateStreamChunk(
            index=self._index,
            token_ids=[token.token_id for token in tokens],
            prompt_tokens=len(self._request.prompt_token_ids),
            completion_tokens=len(tokens),
            cached_tokens=self.num_cached_tokens,
            output_logprobs=self._output_logprobs(tokens),
            input_logprobs=self._input_logprobs() if is_first else None,
        )
        return vllm.GenerateResponse(chunk=chunk)

    def complete(self) -> vllm.GenerateResponse:
        """Return the message with the complete answer."""
        return vllm.GenerateResponse(
            complete=vllm.GenerateComplete(
                index=self._index,
                output_ids=[token.token_id for token in self._tokens],
                finish_reason=_FINISH_REASONS[self._finish_reason],
                prompt_tokens=len(self._request.prompt_token_ids),
                completion_tokens=len(self._tokens),
                cached_tokens=self.num_cached_tokens,
                output_logprobs=self._output_logprobs(self._tokens),
                input_logprobs=self._input_logprobs(),
                kv_transfer_params_json=self.hand_off,
                **self._matched_stop(),
            )
        )

    def _end_at(self, stop: str) -> None:
        self._stop_string = stop
        self._finish_reason, self.is_finished = inference_pb2.FINISH_REASON_STOP, True

    def _matched_stop(self) -> dict[str, Any]:
        """Return the client's stop string or stop token that ended the answer; empty for other endings."""
        if self._stop_string is not None:
            return {"matched_stop_str": self._stop_string}
        last = self._tokens[-1].token_id if self._tokens else None
        is_stop = self._finish_reason == inference_pb2.FINISH_REASON_STOP
        return {"matched_token_id": last} if is_stop and last in self._request.params.stop_token_ids else {}

    def _output_logprobs(self, tokens: Sequence[worker_pb2.SampledToken]) -> vllm.OutputLogProbs | None:
        if self._request.response.logprobs is None:
            return None
        return vllm.OutputLogProbs(
            token_ids=[token.token_id for token in tokens],
            token_logprobs=[token.logprobs.logprob for token in tokens],
            top_logprobs=[_top(token.logprobs) for token in tokens]
            if self._request.response.logprobs
            else None,
        )

    def _input_logprobs(self) -> vllm.InputLogProbs | None:
        if self._request.response.prompt_logprobs is None:
            return None
        values = [vllm.InputTokenLogProb(value=each.logprob) for each in self.prompt_logprobs]
        return vllm.InputLogProbs(
            token_ids=self._request.prompt_token_ids,
            # The first token has no logprob, because no token precedes it.
            token_logprobs=[vllm.InputTokenLogProb(), *values],
            top_logprobs=[vllm.TopLogProbs(), *map(_top, self.prompt_logprobs)]
            if self._request.response.prompt_logprobs
            else None,
        )


def _decoder(request: ValidRequest, tokenizer: Tokenizer) -> StoppingDecoder:
    return StoppingDecoder(
        tokenizer,
        request.response.stop_strings,
        min_tokens=request.params.min_tokens,
        skip_special_tokens=not request.response.keep_special_tokens,
        before=request.token_before_answer,
    )


def _top(logprobs: inference_pb2.TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        token_ids=[candidate.token_id for candidate in logprobs.top],
        values=[candidate.logprob for candidate in logprobs.top],
    )
