"""Serves ``/v1/completions``, which continues texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import MAX_REQUEST_ID_CHARS
from quire.services.router.http.openai.answer_bodies import Completion, CompletionChoice, Usage, finish_name
from quire.services.router.http.openai.answers import OpenAIWriter
from quire.services.router.http.openai.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from quire.services.router.http.openai.requests import CompletionRequest
from quire.services.router.http.openai.sampling_fields import (
    answer_format,
    sampling_params,
    sent_names,
    stopping_params,
)

DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens``, as in OpenAI's API."""


class _Prompt(NamedTuple):
    """The part of a choice that describes its prompt."""

    text: str
    """Text of the prompt; empty unless it is echoed."""
    token_ids: Sequence[int]
    logprobs: Sequence[pb.TokenLogprobs]
    text_offsets: list[int]


class CompletionWriter(OpenAIWriter[CompletionRequest, Completion]):
    """A request to ``/v1/completions``."""

    id_prefix = "cmpl"

    def __init__(self, body: CompletionRequest, model: ServedModel, name: str, turn: asyncio.Lock) -> None:
        super().__init__(body, model, name, turn)
        self.is_read_only = body.only_reads
        self._skips_special_tokens = body.skip_special_tokens is not False
        self._prompts: dict[int, _Prompt] = {}
        self._started: set[int] = set()
        self._text_offsets: dict[int, TextOffsets] = {}

    def generations(self) -> list[pb.Generation]:
        """Return the prompts.

        Raises:
            InvalidArgument: two fields contradict each other.
        """
        body = self.body
        if body.echo and body.prompt_logprobs is not None:
            raise InvalidArgument("prompt_logprobs", "cannot go with echo, which returns them as logprobs")
        prompts = body.prompts
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        options = self.options(
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
            # The offsets of an answer's texts depend on the last token of its prompt.
            prompt_token_ids=bool(body.echo or body.return_token_ids)
            or body.prompt_logprobs is not None
            or body.logprobs is not None,
        )
        sampling, form = sampling_params(body, body.best_of), answer_format(body)
        stopping = stopping_params(body, 1 if body.only_reads else max_tokens)
        return [
            pb.Generation(
                model=body.model,
                text=prompt if isinstance(prompt, str) else None,
                token_ids=pb.TokenIds(ids=prompt) if not isinstance(prompt, str) else None,
                sampling=sampling,
                stopping=stopping,
                response=options,
                request_id=self._name if len(prompts) == 1 else _part(self._name, at),
                format=form,
                cache_salt=body.cache_salt,
                priority=body.priority,
            )
            for at, prompt in enumerate(prompts)
        ]

    def names(self) -> list[dict[str, str]]:
        """Return, for each prompt, the client's names of fields of ``quire.v1``."""
        names, num_prompts = sent_names(self.body), len(self.body.prompts)
        if self.body.echo:
            names["response.prompt_logprobs"] = "logprobs"
        prompts = ["prompt"] if num_prompts == 1 else [f"prompt[{at}]" for at in range(num_prompts)]
        return [{**names, **dict.fromkeys(("text", "token_ids", "token_ids.ids"), each)} for each in prompts]

    def _events(self, response: pb.GenerateStreamResponse) -> list[Completion]:
        return [self._event([self._choice(response)])]

    def _whole(self, answers: Sequence[pb.GenerateResponse], usage: Usage) -> Completion:
        choices = []
        for answer in answers:
            for choice in answer.choices:
                message = pb.GenerateStreamResponse(
                    index=choice.index,
                    text=choice.text,
                    token_ids=choice.token_ids,
                    logprobs=choice.logprobs,
                    finish_reason=choice.finish_reason,
                    prompt_logprobs=answer.prompt_logprobs,
                    prompt_token_ids=answer.prompt_token_ids,
                )
                choices.append(self._choice(message))
        completion = self._event(choices)
        completion.usage = usage
        return completion

    def _event(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(**self._head, object="text_completion", choices=choices)

    def _choice(self, response: pb.GenerateStreamResponse) -> CompletionChoice:
        body, index = self.body, response.index
        text, token_ids, logprobs = response.text, list(response.token_ids), list(response.logprobs)
        if body.only_reads:
            text, token_ids, logprobs = "", [], []
        prompt = self._prompt(response) if index not in self._started else None
        self._started.add(index)
        marked: list[pb.TokenLogprobs | None] = [*logprobs]
        all_ids = token_ids
        offsets = self._offsets(index, prompt).of(token_ids) if body.logprobs is not None else []
        if prompt and body.echo:
            text = prompt.text + text
            all_ids = [*prompt.token_ids, *token_ids]
            offsets = prompt.text_offsets + offsets
            marked = [None, *prompt.logprobs, *logprobs]
        choice = CompletionChoice(
            index=index, text=text, logprobs=None, finish_reason=finish_name(response.finish_reason)
        )
        if body.logprobs is not None:
            choice.logprobs = completion_logprobs(self._names, all_ids, marked, offsets)
        if body.return_token_ids:
            choice.token_ids = token_ids
        if prompt and body.return_token_ids:
            choice.prompt_token_ids = list(prompt.token_ids)
        if prompt and body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._names, prompt.token_ids, prompt.logprobs)
        return choice

    def _offsets(self, index: int, prompt: _Prompt | None) -> TextOffsets:
        """Return the text offsets of an answer's tokens; they begin after the prompt if it is echoed."""
        if index not in self._text_offsets:
            self._text_offsets[index] = TextOffsets(
                self._model.tokenizer,
                skip_special_tokens=self._skips_special_tokens,
                start=len(prompt.text) if prompt else 0,
                before=prompt.token_ids[-1] if prompt and prompt.token_ids else None,
            )
        return self._text_offsets[index]

    def _prompt(self, response: pb.GenerateStreamResponse) -> _Prompt:
        """Return the description of a prompt from the first message of its stream."""
        at = response.index // (self.body.n or 1)
        if at not in self._prompts:
            ids, text, offsets = list(response.prompt_token_ids), "", []
            if self.body.echo:
                given, tokenizer = self.body.prompts[at], self._model.tokenizer
                # A text from the client is returned unchanged, without the special tokens that were added.
                skips = isinstance(given, str) or self._skips_special_tokens
                text = given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=skips)
                if self.body.logprobs is not None:
                    found = TextOffsets(tokenizer, skip_special_tokens=skips).of(ids)
                    offsets = [min(offset, len(text)) for offset in found]
            self._prompts[at] = _Prompt(text, ids, list(response.prompt_logprobs), offsets)
        return self._prompts[at]


def _part(name: str, at: int) -> str:
    """Return the request id of prompt number ``at``: the request's own id with a suffix."""
    suffix = f"-{at}"
    return name[: MAX_REQUEST_ID_CHARS - len(suffix)] + suffix
