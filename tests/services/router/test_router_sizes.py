"""Requests that are large in any of their fields are refused by that field's name and limit."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from quire.client.errors import InvalidRequest, from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.errors import MAX_MESSAGE_CHARS, InvalidArgument, NotFound
from tests.testing.rpc_errors import error_of

MANY = 200_000
MESSAGE = pb.ChatMessage(role="user", content="x")
ONE = pb.TokenIds(ids=[5])
GENERATIONS = {
    "token_ids": pb.Generation(token_ids=pb.TokenIds(ids=[5] * MANY)),
    "chat.messages": pb.Generation(chat=pb.Chat(messages=[MESSAGE] * (MANY // 2))),
    "sampling.allowed_token_ids": pb.Generation(
        token_ids=ONE, sampling=pb.SamplingParams(allowed_token_ids=[5] * MANY)
    ),
    "sampling.bad_words": pb.Generation(token_ids=ONE, sampling=pb.SamplingParams(bad_words=["x"] * MANY)),
    "sampling.bad_word_token_ids": pb.Generation(
        token_ids=ONE, sampling=pb.SamplingParams(bad_word_token_ids=[ONE] * MANY)
    ),
    "sampling.logit_bias": pb.Generation(
        token_ids=ONE, sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(MANY // 4), 1.0))
    ),
    "stopping.stop_token_ids": pb.Generation(
        token_ids=ONE, stopping=pb.StoppingParams(stop_token_ids=[5] * MANY)
    ),
    "stopping.stop_strings": pb.Generation(
        token_ids=ONE, stopping=pb.StoppingParams(stop_strings=["x"] * MANY)
    ),
    "format.json_schema": pb.Generation(token_ids=ONE, format=pb.ResponseFormat(json_schema="[" * MANY)),
    "cache_salt": pb.Generation(token_ids=ONE, cache_salt="x" * MANY),
}
REQUESTS = {
    **{field: ("Generate", pb.GenerateRequest(generation=each)) for field, each in GENERATIONS.items()},
    "generations": ("GenerateBatch", pb.GenerateBatchRequest(generations=[pb.Generation()] * MANY)),
    "text": ("Tokenize", pb.TokenizeRequest(text="x" * (9 << 20))),
    "detokenized": ("Detokenize", pb.DetokenizeRequest(token_ids=[5] * (MANY + (1 << 20)))),
}


@pytest.mark.parametrize("field", REQUESTS)
async def test_a_large_field_is_named(stub: Any, field: str) -> None:
    method, request = REQUESTS[field]
    call = getattr(stub, method)(request)
    error = from_rpc_error(await error_of(call.read() if method == "GenerateBatch" else call))
    assert isinstance(error, InvalidRequest)
    assert error.field == ("token_ids" if field == "detokenized" else field)
    assert int(error.limit) > 0


async def test_an_error_repeats_little_of_the_request(pair: Any) -> None:
    stub: pb_grpc.GenerationServiceStub = await pair.start()
    caught = await error_of(
        stub.Generate(pb.GenerateRequest(generation=pb.Generation(model="x\n" * MANY, token_ids=ONE)))
    )
    assert caught.code() is grpc.StatusCode.NOT_FOUND
    assert "…" in (caught.details() or "")
    assert len(caught.details() or "") < MAX_MESSAGE_CHARS / 2


def test_every_part_of_an_error_is_cut() -> None:
    long = "x" * MANY
    for error in (NotFound(long, metadata={"a": long}), InvalidArgument("a", long, metadata={"b": long})):
        assert sum(detail.ByteSize() for detail in error.details()) < 4 * MAX_MESSAGE_CHARS
