"""Turns generated tokens into the text that is shown, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from quire.tokenization.stop_strings import Fed, StopMatcher
from quire.tokenization.tokenizer import IncrementalDecoder, Tokenizer


class StoppingDecoder:
    """Turns one sequence's tokens into text, which ends before a stop string or just after it.

    Stop strings are recognised only in the text of tokens after the first ``min_tokens``.

    Args:
        before: the token that the text continues, see ``IncrementalDecoder``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Sequence[str],
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        keep_stop_string: bool = False,
        before: int | None = None,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, before=before)
        self._has_stop_strings = bool(stop_strings)
        self._matcher = StopMatcher(stop_strings)
        self._min_tokens = min_tokens
        self._keeps_stop_string = keep_stop_string
        self._num_tokens = 0

    def feed(self, token_ids: Sequence[int]) -> tuple[Fed, int]:
        """Take the next tokens, up to the one that completes a stop string.

        Returns:
            The text that may be shown, and the number of tokens that were taken.
        """
        if not self._has_stop_strings:
            self._num_tokens += len(token_ids)
            return Fed(self._decoder.feed(token_ids)), len(token_ids)
        text = ""
        for num_taken, token_id in enumerate(token_ids, start=1):
            fed = self.step(token_id)
            text += fed.text
            if fed.is_stopped:
                return Fed(text, fed.stop), num_taken
        return Fed(text), len(token_ids)

    def step(self, token_id: int) -> Fed:
        """Take the next token and return the text that may be shown; do not call it after a stop."""
        self._num_tokens += 1
        return self._match(self._decoder.step(token_id))

    def flush(self) -> Fed:
        """Return the text that was held back, at the end of the tokens."""
        fed = self._match(self._decoder.flush())
        return fed if fed.is_stopped else Fed(fed.text + self._matcher.flush())

    def _match(self, text: str) -> Fed:
        if self._num_tokens <= self._min_tokens:
            return Fed(text)
        fed = self._matcher.feed(text)
        return Fed(fed.text + fed.stop, fed.stop) if fed.stop and self._keeps_stop_string else fed
