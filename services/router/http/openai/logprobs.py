"""Writes logprobs in OpenAI's two forms, and prompt logprobs in vLLM's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.answer_bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from quire.tokenization.tokenizer import IncrementalDecoder, Tokenizer

LEAST_LOGPROB = -9999.0
"""Logprob of an impossible token in JSON, which has no infinity."""


class TokenNames:
    """Names of tokens in logprobs: their text, or ``token_id:N``."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self.text = tokenizer.text_of
        self._as_ids = as_ids

    def __getitem__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """Return the UTF-8 bytes of a token; None if it is only a part of a character."""
        text = self.text(token_id)
        return None if "\ufffd" in text else list(text.encode())


class TextOffsets:
    """Computes the offset, in characters, at which the text of each token begins.

    A token without text of its own gets the offset of the next text. Such tokens are skipped special tokens
    and parts of a character.

    Args:
        before: the token that the text continues, see ``IncrementalDecoder``.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0, before: int | None = None
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, before=before)
        self._at = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens, which follow those of earlier calls."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            self._at += len(self._decoder.step(token_id))
        return offsets


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[pb.TokenLogprobs | None],
    text_offsets: list[int],
) -> CompletionLogprobs:
    """Return the logprobs of tokens in the form of completions.

    Args:
        logprobs: one member per token; None for a token without logprobs.
    """
    pairs = list(zip(token_ids, logprobs, strict=True))
    return CompletionLogprobs(
        tokens=[names[token_id] for token_id in token_ids],
        token_logprobs=[_finite(each.logprob) if each else None for each in logprobs],
        top_logprobs=[_by_name(names, *pair) for pair in pairs],
        text_offset=text_offsets,
    )


def _by_name(names: TokenNames, token_id: int, logprobs: pb.TokenLogprobs | None) -> dict[str, float] | None:
    """Return the logprobs of the top tokens and of the text's own token, by name.

    If several tokens have the same name, the most probable one is returned.
    """
    if logprobs is None:
        return None
    best: dict[str, float] = {}
    for candidate in logprobs.top:
        best.setdefault(names[candidate.token_id], _finite(candidate.logprob))
    best.setdefault(names[token_id], _finite(logprobs.logprob))
    return best


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Iterable[pb.TokenLogprobs]
) -> ChatLogprobs:
    """Return the logprobs of an answer's tokens in the form of chat completions."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=names[token_id],
                logprob=_finite(each.logprob),
                bytes=names.bytes(token_id),
                top_logprobs=[
                    TopLogprob(
                        token=names[candidate.token_id],
                        logprob=_finite(candidate.logprob),
                        bytes=names.bytes(candidate.token_id),
                    )
                    for candidate in each.top
                ],
            )
            for token_id, each in zip(token_ids, logprobs, strict=True)
        ]
    )


def prompt_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs]
) -> PromptLogprobs:
    """Return the logprobs of a prompt, given the logprobs of all its tokens except the first."""
    found: PromptLogprobs = [None]
    for token_id, each in zip(token_ids[1:], logprobs, strict=True):
        place = {
            str(candidate.token_id): _prompt_logprob(names, candidate.token_id, candidate.logprob, rank)
            for rank, candidate in enumerate(each.top, start=1)
        }
        place.setdefault(str(token_id), _prompt_logprob(names, token_id, each.logprob, None))
        found.append(place)
    return found


def _prompt_logprob(names: TokenNames, token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
    return PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=names.text(token_id))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
