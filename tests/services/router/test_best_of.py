"""The best of several answers: which they are, in which order, and that nothing of them is lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.services.router.outputs.best_of import best_of
from quire.services.router.outputs.output import OutputAssembler


def answers(scores: list[float]) -> list[OutputAssembler]:
    made: list[Any] = [SimpleNamespace(index=at, cumulative_logprob=score) for at, score in enumerate(scores)]
    return made


def piece(index: int, text: str) -> pb.GenerateStreamResponse:
    return pb.GenerateStreamResponse(
        pieces=[pb.Piece(content=text, num_tokens=len(text))],
        index=index,
        text=text,
        token_ids=[ord(each) for each in text],
        logprobs=[pb.TokenLogprobs(logprob=-ord(each)) for each in text],
    )


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3), st.text("abc", min_size=1, max_size=3)), max_size=12),
    scores=st.lists(st.sampled_from([-3.0, -2.0, -1.0]), min_size=4, max_size=4),
    num_best=st.integers(1, 4),
)
async def test_the_best_are_first_and_complete(
    pieces: list[tuple[int, str]], scores: list[float], num_best: int
) -> None:
    async def responses() -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        for index, text in pieces:
            yield piece(index, text)
        for index in range(4):
            yield pb.GenerateStreamResponse(index=index, finish_reason=pb.FINISH_REASON_LENGTH)

    found = [each async for each in best_of(responses(), answers(scores), num_best)]
    assert [each.index for each in found] == list(range(num_best))
    # A stable sort leaves equals in the order of their seeds.
    ranking = sorted(range(4), key=lambda index: -scores[index])[:num_best]
    for index, whole in zip(ranking, found, strict=True):
        text = "".join(each for at, each in pieces if at == index)
        assert (whole.text, whole.score) == (text, scores[index])
        assert [(each.content, each.num_tokens) for each in whole.pieces] == [(text, len(text))][: len(text)]
        assert list(whole.token_ids) == [ord(each) for each in text]
        assert [each.logprob for each in whole.logprobs] == [-ord(each) for each in text]
        assert whole.finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_failure_yields_nothing_and_ends_the_stream() -> None:
    is_closed = False

    async def failing() -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        nonlocal is_closed
        try:
            yield piece(0, "a")
            raise RuntimeError("scripted")
        finally:
            is_closed = True

    found = []
    with pytest.raises(RuntimeError, match="scripted"):
        async for each in best_of(failing(), answers([-1.0, -2.0]), 1):
            found.append(each)
    assert (found, is_closed) == ([], True)
