"""Groups the answers of a request that are computed, and retried, together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.sampling.params import SamplingParams
from quire.services.router.outputs.output import OutputAssembler
from quire.services.router.workers.worker import Worker


class Death(NamedTuple):
    """A worker that ended while it served a request, or whose engine hung."""

    worker: Worker
    is_hang: bool

    @classmethod
    def of(cls, worker: Worker) -> Death:
        """Return the death of a worker that has just ended or hangs."""
        return cls(worker, worker.health.is_stalled)

    @property
    def has_lasted(self) -> bool:
        """Whether the worker is still gone: an engine that seemed to hang may have had a very long step."""
        return not self.is_hang or self.worker.health.is_stalled


@dataclass(slots=True)
class AnswerGroup:
    """Answers that are computed together: at first all of a request; after a failure each answer separately.

    Attributes:
        request_id: id of the request.
        sequence_id: id under which the workers know this group.
        answers: the answers, in the order of their index; a finished beam search may have fewer than beams.
        attempt: number of earlier attempts of this group and of the group that it was split from.
        num_moves: number of those attempts that ended because their worker drains.
        num_retries: number of those attempts that failed while other workers were there.
        deaths: the workers that died with it since it was last cleared of suspicion.
        died_at: when the router noticed the last of these deaths, a reading of its clock.
    """

    request_id: str
    sequence_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    answers: list[OutputAssembler]
    attempt: int = 0
    num_moves: int = 0
    num_retries: int = 0
    deaths: tuple[Death, ...] = ()
    died_at: float = 0.0

    @property
    def names(self) -> dict[str, object]:
        """What names the group and its attempt in the log."""
        return {"request_id": self.request_id, "sequence_id": self.sequence_id, "attempt": self.attempt}

    @property
    def num_failures(self) -> int:
        """Number of earlier attempts that failed."""
        return self.attempt - self.num_moves

    @property
    def is_single(self) -> bool:
        """Whether there is only one answer; only then can the prefill worker sample the first token."""
        return len(self.answers) == 1

    @property
    def is_beam_search(self) -> bool:
        """Whether this is a beam search, whose tokens are known only at its end."""
        return self.params.beam is not None

    @property
    def is_finished(self) -> bool:
        """Whether all answers have finished."""
        return all(answer.finish_reason for answer in self.answers)

    @property
    def must_split(self) -> bool:
        """Whether its answers already have different tokens, so that each continues from its own prompt."""
        return not self.is_single and any(answer.token_ids for answer in self.answers)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens that the next attempt continues after the prompt; empty for several answers."""
        return self.answers[0].token_ids if self.is_single else []

    @property
    def token_ids(self) -> list[int]:
        """Tokens that the next attempt begins with: the prompt and the output tokens so far."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of these tokens that a prefill worker computes.

        For several answers it leaves out the last token, whose logits the decode worker needs.
        """
        return len(self.token_ids) - (not self.is_single)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the shortest answer."""
        return min(len(answer.token_ids) for answer in self.answers)

    def split(self) -> list[AnswerGroup]:
        """Return a separate group for each unfinished answer; answer i samples with the seed + i."""
        return [self._separate(answer) for answer in self.answers if not answer.finish_reason]

    def _separate(self, answer: OutputAssembler) -> AnswerGroup:
        params = replace(self.params, n=1, seed=(self.params.seed + answer.index) % 2**64)
        sequence_id = f"{self.sequence_id}-{answer.index}"
        return replace(self, sequence_id=sequence_id, params=params, answers=[answer])
