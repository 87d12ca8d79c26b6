"""Turns sampled tokens into the messages that the client reads: text deltas, cut at a stop string."""

from __future__ import annotations

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.sampling.params import SamplingParams
from quire.services.requests.validation import ValidRequest
from quire.services.router.outputs.dividing_decoder import DividingDecoder
from quire.services.router.workers.answer_part import AnswerPart
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
        self._stopping: SamplingParams = request.params
        self._wants_logprobs = request.response.logprobs is not None
        self._divider: DividingDecoder | None = None
        if request.division is not None:
            self._divider = DividingDecoder(tokenizer, request, request.division.new_parser(), index)
        self._decoder = self._divider or StoppingDecoder(
            tokenizer,
            request.response.stop_strings,
            min_tokens=request.params.min_tokens,
            skip_special_tokens=not request.response.keep_special_tokens,
            keep_stop_string=request.response.keep_stop_string,
            before=request.token_before_answer,
        )
        self._unsent = ""
        """Text of tokens that were received from another router, which had held this text back."""
        self._num_sent_ahead = 0
        """Number of further characters that the client has received already."""

    def resume(self, received: pb.ReceivedAnswer) -> None:
        """Continue after tokens and text that the client has received from another router.

        Raises:
            InvalidArgument: the tokens contain a stop string, so the answer has ended.
        """
        self.token_ids = list(received.token_ids)
        shown, _ = self._decoder.feed(self.token_ids)
        if self._divider is not None:
            # The client has these pieces: they depend on the tokens alone.
            self._divider.move_pieces(pb.GenerateStreamResponse())
        if received.is_finished:
            self.finish_reason = pb.FINISH_REASON_STOP
            return
        if shown.is_stopped:
            raise InvalidArgument("received", f"answer {self.index} ends with a stop string: it has finished")
        self._unsent = shown.text[received.num_characters :]
        self._num_sent_ahead = max(0, received.num_characters - len(shown.text))

    def respond(self, part: AnswerPart) -> pb.GenerateStreamResponse:
        """Return the client's message for a part of the answer, without anything after a stop string."""
        shown, num_tokens = self._decoder.feed(part.token_ids)
        text, stop = shown.text, shown.stop
        if part.finish_reason and stop is None:
            rest = self._decoder.flush()
            text, stop = text + rest.text, rest.stop
        text = self._without_sent(text)
        token_ids, logprobs = part.token_ids[:num_tokens], part.logprobs[:num_tokens]
        self.token_ids += token_ids
        # Add them one by one: the sum must not depend on how many tokens arrive at once.
        for each in logprobs:
            self.cumulative_logprob += each.logprob
        self.finish_reason = part.finish_reason if stop is None else pb.FINISH_REASON_STOP
        response = pb.GenerateStreamResponse(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs if self._wants_logprobs else None,
            score=part.score,
            stop_string=stop,
        )
        if self._divider is not None:
            self._divider.move_pieces(response)
            if self._divider.has_calls and self.finish_reason == pb.FINISH_REASON_STOP:
                self.finish_reason = pb.FINISH_REASON_TOOL_CALLS
        response.finish_reason = self.finish_reason
        return response

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of the answer's tokens of reasoning; 0 if it is not divided."""
        return self._divider.num_reasoning_tokens if self._divider is not None else 0

    def _without_sent(self, text: str) -> str:
        """Return new text for the client; how much is withheld depends on how the tokens were batched."""
        unsent, self._unsent = self._unsent, ""
        num_sent = min(self._num_sent_ahead, len(text))
        self._num_sent_ahead -= num_sent
        return unsent + text[num_sent:]

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
