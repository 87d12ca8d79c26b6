"""The number of a message's fields, compared with a count of the parsed message."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.rpc import message_parts
from quire.rpc.errors import InvalidArgument
from quire.rpc.message_parts import PACKED_BYTES, check_parts

DESCRIPTOR: Any = pb.GenerateBatchRequest.DESCRIPTOR
words = st.text("xy\x00", max_size=4)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
chats = st.builds(
    pb.Chat, messages=st.lists(st.builds(pb.ChatMessage, role=words, content=words), max_size=4), tools=words
)
generations = st.builds(
    pb.Generation,
    text=words,
    model=words,
    sampling=st.none()
    | st.builds(
        pb.SamplingParams,
        temperature=st.none() | st.floats(width=32, allow_nan=False),
        seed=st.none() | st.integers(0, 2**64 - 1),
        logit_bias=st.dictionaries(st.integers(0, 9), st.floats(-1, 1, width=32), max_size=3),
        bad_word_token_ids=st.lists(st.builds(pb.TokenIds, ids=ids), max_size=3),
    ),
    stopping=st.none() | st.builds(pb.StoppingParams, stop_strings=st.lists(words, max_size=4)),
) | st.builds(pb.Generation, chat=chats)


def count(message: Message) -> int:
    """Return how many fields a message consists of; a packed list counts by its size as well."""
    number = 0
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            number += 3 * len(value)
        elif kind is not None:
            parts = value if field.is_repeated else [value]
            number += sum(1 + count(each) for each in parts)
        elif field.is_repeated and field.is_packed:
            packed = type(message)(**{field.name: value}).SerializeToString()
            number += 1 + (len(packed) - (2 if len(packed) < 130 else 3)) // PACKED_BYTES
        else:
            number += len(value) if field.is_repeated else 1
    return number


@given(generations=st.lists(generations, max_size=3))
def test_the_limit_is_exact(generations: list[pb.Generation]) -> None:
    request = pb.GenerateBatchRequest(generations=generations)
    encoded, number = request.SerializeToString(), count(request)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_parts, "MAX_PARTS", number)
        check_parts(encoded, DESCRIPTOR)
        if number:
            patch.setattr(message_parts, "MAX_PARTS", number - 1)
            with pytest.raises(InvalidArgument, match=f"at most {number - 1} fields") as caught:
                check_parts(encoded, DESCRIPTOR)
            assert caught.value.metadata["limit"] == str(number - 1)


@pytest.mark.parametrize("field", [b"", b"\x08"])
def test_a_number_without_an_end_takes_no_time(field: bytes) -> None:
    # Reading it to the end would take hours.
    check_parts(field + b"\xff" * (16 << 20), DESCRIPTOR)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_truncated_message_is_refused_by_the_parser(cut: int) -> None:
    request: Any = pb.GenerateRequest(generation=pb.Generation(text="hello world"))
    check_parts(request.SerializeToString()[:-cut], request.DESCRIPTOR)
