"""A running request: collects the engine's updates into answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from quire.engine.errors import RequestFailedError
from quire.engine.sequences.sequence import (
    GeneratedToken,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)
from quire.llm.outputs import CompletionOutput, Logprob, RequestOutput
from quire.tokenization.stopping_decoder import StoppingDecoder
from quire.tokenization.tokenizer import IncrementalDecoder, Tokenizer


class EncodedPrompt(NamedTuple):
    """A prompt; ``text`` is None if it was given as token ids."""

    text: str | None
    token_ids: list[int]
    is_chat: bool = False

    @property
    def token_before_answer(self) -> int | None:
        """The token whose text the answers continue; None for a chat, whose answers begin a text."""
        return None if self.is_chat else self.token_ids[-1]


class TextOptions(NamedTuple):
    """How the tokens of answers become text, and which answers are returned.

    Attributes:
        num_best: how many of the most probable answers to return; None returns all.
        has_logprobs: whether an answer contains its tokens' logprobs, if they are known.
    """

    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    keep_stop_string: bool = False
    num_best: int | None = None
    has_logprobs: bool = True


class AnswerCollector:
    """Collects one sequence's tokens; the answer is finished when ``finish_reason`` is set."""

    def __init__(
        self, index: int, options: TextOptions, tokenizer: Tokenizer, before: int | None = None
    ) -> None:
        self.finish_reason: Literal["stop", "length"] | None = None
        self.token_ids: list[int] = []
        self._index = index
        self._options = options
        self._tokenizer = tokenizer
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob: float | None = None
        self._stop: str | None = None
        self._text = ""
        self._before = before
        # Without stop strings no decoder is needed: the text is decoded once, at the end.
        self._decoder = (
            StoppingDecoder(
                tokenizer,
                options.stop_strings,
                min_tokens=options.min_tokens,
                skip_special_tokens=options.skip_special_tokens,
                keep_stop_string=options.keep_stop_string,
                before=before,
            )
            if options.stop_strings
            else None
        )

    def add(self, update: SequenceUpdate) -> None:
        """Add the tokens of one step, up to a token that completes a stop string."""
        for token in update.tokens:
            self._append(token)
            if self._stop is not None:
                return
        if update.status == SequenceStatus.FINISHED_STOPPED:
            self.finish_reason = "stop"
        elif update.status == SequenceStatus.FINISHED_LENGTH:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._flush()
        beam = update.sequence.params.beam
        if beam is not None and update.score is not None:
            self._cumulative_logprob = beam.logprob(update.score, len(self.token_ids))

    def output(self, stop_token_ids: frozenset[int]) -> CompletionOutput:
        """Return the finished answer; ``stop_token_ids`` are the request's, without the model's own."""
        assert self.finish_reason is not None
        logprobs = _name_tokens(self.token_ids[: len(self._logprobs)], self._logprobs, self._tokenizer)
        stop_reason: int | str | None = self._stop
        if stop_reason is None and self.finish_reason == "stop" and self.token_ids[-1] in stop_token_ids:
            stop_reason = self.token_ids[-1]
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=(logprobs or None) if self._options.has_logprobs else None,
        )

    def _append(self, token: GeneratedToken) -> None:
        self.token_ids.append(token.token_id)
        if token.logprobs is not None:
            self._logprobs.append(token.logprobs)
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + token.logprobs.logprob
        if self._decoder is not None:
            fed = self._decoder.step(token.token_id)
            self._show(fed.text, fed.stop)

    def _flush(self) -> None:
        if self._decoder is None:
            decoder = IncrementalDecoder(
                self._tokenizer, skip_special_tokens=self._options.skip_special_tokens, before=self._before
            )
            self._text = decoder.feed(self.token_ids) + decoder.flush()
        else:
            fed = self._decoder.flush()
            self._show(fed.text, fed.stop)

    def _show(self, text: str, stop: str | None) -> None:
        self._text += text
        if stop is not None:
            self._stop = stop
            self.finish_reason = "stop"


class Request:
    """A prompt in the engine, and the answers to it."""

    def __init__(
        self, prompt: EncodedPrompt, sequence: Sequence, options: TextOptions, tokenizer: Tokenizer
    ) -> None:
        self.sequence = sequence
        self.error: RequestFailedError | None = None
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._num_best = options.num_best
        before = prompt.token_before_answer
        self._answers = [
            AnswerCollector(i, options, tokenizer, before) for i in range(sequence.params.num_sequences)
        ]

    @property
    def num_generated_tokens(self) -> int:
        """Number of generated tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self._answers)

    def add(self, update: SequenceUpdate) -> bool:
        """Add one step's tokens; return whether a stop string ended a sequence that the engine still runs."""
        if update.error is not None:
            self.error = update.error
            return False
        answer = self._answers[update.sequence.index]
        answer.add(update)
        return answer.finish_reason is not None and not update.status.is_finished

    def output(self) -> RequestOutput:
        """Return the prompt with its answers."""
        sequence = self.sequence
        # A beam search may end with fewer answers than beams.
        answers = [
            answer.output(sequence.params.stop_token_ids) for answer in self._answers if answer.finish_reason
        ]
        if self._num_best is not None:
            best = sorted(answers, key=lambda answer: -(answer.cumulative_logprob or 0.0))[: self._num_best]
            answers = [replace(answer, index=index) for index, answer in enumerate(best)]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if sequence.params.num_prompt_logprobs is not None:
            following = self._prompt.token_ids[1:]
            prompt_logprobs = [None, *_name_tokens(following, sequence.prompt_logprobs, self._tokenizer)]
        return RequestOutput(
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=answers,
            num_cached_tokens=sequence.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )


def _name_tokens(
    token_ids: list[int], logprobs: list[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    """Return, for each position, the logprobs of the token there and of the most probable tokens, by id."""
    named = []
    for token_id, (logprob, top) in zip(token_ids, logprobs, strict=True):
        candidates = {candidate: (value, rank) for rank, (candidate, value) in enumerate(top, start=1)}
        at_position: dict[int, tuple[float, int | None]] = {token_id: (logprob, None), **candidates}
        named.append(
            {
                candidate: Logprob(value, rank, tokenizer.decode([candidate], skip_special_tokens=False))
                for candidate, (value, rank) in at_position.items()
            }
        )
    return named
