"""A request's answers, as far as they are computed together."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protos import inference_pb2 as pb
from quire.services.router.output import OutputAssembler


@dataclass(slots=True)
class Part:
    """Answers that are computed side by side: at first all, after a loss each by itself.

    Attributes:
        sequence_id: the workers' name for it.
        answers: in the order of their index; a finished search may have fewer than it had beams.
        attempt: tries of this part and of those that it comes from, before the present one.
    """

    sequence_id: str
    prompt_token_ids: list[int]
    sampling: pb.SamplingParams
    answers: list[OutputAssembler]
    attempt: int = 0

    @property
    def is_single(self) -> bool:
        """Whether the prefill worker draws the first token, as it can for one answer alone."""
        return len(self.answers) == 1

    @property
    def is_search(self) -> bool:
        """Whether nothing of it is known before its end."""
        return self.sampling.HasField("beam")

    @property
    def is_finished(self) -> bool:
        """Whether no answer goes on."""
        return all(answer.finish_reason for answer in self.answers)

    @property
    def must_split(self) -> bool:
        """Whether its answers have grown apart, so that no one prompt continues them."""
        return not self.is_single and any(answer.token_ids for answer in self.answers)

    @property
    def output_token_ids(self) -> list[int]:
        """What an attempt continues besides the prompt."""
        return self.answers[0].token_ids if self.is_single else []

    @property
    def token_ids(self) -> list[int]:
        """What an attempt begins with."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_prefilled_tokens(self) -> int:
        """Of these, what a prefill worker computes: several answers need the last token's logits at D."""
        return len(self.token_ids) - (not self.is_single)

    def split(self) -> list[Part]:
        """Return each unfinished answer by itself: number i draws as if alone, with the seed + i."""
        return [self._alone(answer) for answer in self.answers if not answer.finish_reason]

    def _alone(self, answer: OutputAssembler) -> Part:
        sampling = pb.SamplingParams()
        sampling.CopyFrom(self.sampling)
        sampling.ClearField("n")
        sampling.seed = (self.sampling.seed + answer.index) % 2**64
        name = f"{self.sequence_id}-{answer.index}"
        return Part(name, self.prompt_token_ids, sampling, [answer], self.attempt)
