"""Of more answers than were asked for, the most probable ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.protos import inference_pb2 as pb
from quire.services.router.output import OutputAssembler


async def best_of(
    responses: AsyncGenerator[pb.GenerateStreamResponse, None],
    answers: Sequence[OutputAssembler],
    num_best: int,
) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    """Wait for all answers, then yield each of the best in one message, scored by its logprob.

    The best is number 0. Among equals the one drawn with the smaller seed comes first.
    """
    pieces: defaultdict[int, list[pb.GenerateStreamResponse]] = defaultdict(list)
    async with aclosing(responses):
        async for response in responses:
            pieces[response.index].append(response)
    best = sorted(answers, key=lambda answer: -answer.cumulative_logprob)[:num_best]
    for rank, answer in enumerate(best):
        whole = pb.GenerateStreamResponse()
        for piece in pieces[answer.index]:
            # Merging joins lists and takes the last value of everything else: text has to be joined here.
            piece.text = whole.text + piece.text
            whole.MergeFrom(piece)
        whole.index = rank
        whole.score = answer.cumulative_logprob
        yield whole
