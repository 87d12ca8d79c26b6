"""Messages of very many fields are refused before they are parsed."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc import message_parts
from quire.rpc.errors import InvalidArgument
from quire.rpc.message_parts import check_parts
from tests.testing.rpc_errors import error_of

LIMIT = 4096
EMPTY = b"\x0a\x00"


def check(encoded: bytes, kind: type[Message]) -> None:
    descriptor = kind.DESCRIPTOR
    assert isinstance(descriptor, Descriptor)
    check_parts(encoded, descriptor)


@pytest.mark.parametrize(
    ("encoded", "kind"),
    [
        (EMPTY * (LIMIT + 1), pb.GenerateBatchRequest),
        (pb.GenerateRequest(generation=pb.Generation(chat=pb.Chat.FromString(EMPTY * LIMIT))), None),
        (pb.DetokenizeRequest(token_ids=[5] * (16 * LIMIT)), None),
        (b"\x08\x05" * (LIMIT + 1), pb.DetokenizeRequest),
    ],
)
def test_too_many_parts_are_refused(encoded: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_parts, "MAX_PARTS", LIMIT)
    kind = kind or type(encoded)
    encoded = encoded if isinstance(encoded, bytes) else encoded.SerializeToString()
    with pytest.raises(InvalidArgument, match=f"at most {LIMIT} fields"):
        check(encoded, kind)


def test_large_texts_and_the_largest_lists_pass() -> None:
    check(pb.TokenizeRequest(text="x" * (8 << 20)).SerializeToString(), pb.TokenizeRequest)
    ids = pb.DetokenizeRequest(token_ids=[150_000] * (1 << 20))
    check(ids.SerializeToString(), pb.DetokenizeRequest)


@given(rubbish=st.binary(max_size=200))
def test_malformed_messages_are_refused_by_the_parser(rubbish: bytes) -> None:
    check(rubbish, pb.GenerateRequest)


async def test_the_public_server_checks(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stub: pb_grpc.GenerationServiceStub = await pair.start()
    monkeypatch.setattr(message_parts, "MAX_PARTS", LIMIT)
    caught = await error_of(stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * (128 << 10))))
    assert caught.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"must consist of at most {LIMIT} fields" in (caught.details() or "")
