"""Decides when a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class StopRules:
    """Ends a sequence at a stop token, at its maximum length, or at the end of a prefill.

    Attributes:
        eos_token_ids: the model's end-of-sequence tokens.
        max_model_len: most tokens of a sequence, prompt and output.
    """

    eos_token_ids: frozenset[int]
    max_model_len: int

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens that end an answer."""
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self.eos_token_ids

    def max_output_tokens(self, prompt: Sequence) -> int:
        """Return the most tokens of an answer to a prompt."""
        return min(prompt.params.max_tokens, self.max_model_len - prompt.num_prompt_tokens)

    def num_tokens_left(self, sequence: Sequence) -> int:
        """Return how many more tokens a sequence may get."""
        return self.max_output_tokens(sequence) - sequence.num_output_tokens

    def status_after_token(self, sequence: Sequence) -> SequenceStatus:
        """Return the status of a sequence after a new token."""
        params, token_id, num_tokens = sequence.params, sequence.token_ids[-1], len(sequence.token_ids)
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        is_stop = token_id in params.stop_token_ids or (
            not params.ignore_eos and token_id in self.eos_token_ids
        )
        if is_stop and num_output_tokens >= params.min_tokens:
            return SequenceStatus.FINISHED_STOPPED
        if num_output_tokens >= params.max_tokens or num_tokens >= self.max_model_len:
            return SequenceStatus.FINISHED_LENGTH
        if sequence.stops_after_prefill:
            return SequenceStatus.FINISHED_HANDED_OVER
        return SequenceStatus.DECODING
