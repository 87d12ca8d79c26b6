"""Selects the most probable answers when more were generated than the client asked for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from quire.protos import inference_pb2 as pb
from quire.services.router.outputs.dividing_decoder import join_pieces
from quire.services.router.outputs.output import OutputAssembler


async def best_of(
    responses: AsyncGenerator[pb.GenerateStreamResponse, None],
    answers: Sequence[OutputAssembler],
    num_best: int,
) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    """Wait for all answers, then yield each of the best in one message with its logprob as the score.

    The best answer has index 0. Among equals, the answer sampled with the smaller seed comes first.
    """
    pieces: defaultdict[int, list[pb.GenerateStreamResponse]] = defaultdict(list)
    async with aclosing(responses):
        async for response in responses:
            pieces[response.index].append(response)
    best = sorted(answers, key=lambda answer: -answer.cumulative_logprob)[:num_best]
    for rank, answer in enumerate(best):
        whole = await asyncio.to_thread(_joined, pieces.pop(answer.index))
        whole.index = rank
        whole.score = answer.cumulative_logprob
        yield whole


def _joined(pieces: Sequence[pb.GenerateStreamResponse]) -> pb.GenerateStreamResponse:
    """Return one message with the contents of all messages of an answer."""
    whole = pb.GenerateStreamResponse()
    for piece in pieces:
        whole.MergeFrom(piece)
    # MergeFrom joins lists, but keeps only the last value of other fields: the text has to be joined here.
    whole.text = "".join(piece.text for piece in pieces)
    join_pieces(whole)
    return whole
