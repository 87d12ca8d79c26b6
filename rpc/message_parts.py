"""Counts the fields of a message before it is parsed, because parsing blocks the whole process."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from quire.rpc.errors import InvalidArgument

MAX_PARTS = 1 << 19
"""Maximum number of fields in a message, which take about 50 ms to parse."""
SMALL_MESSAGE_BYTES = 64 << 10
"""Size up to which messages are not counted."""
PACKED_BYTES = 16
"""Parsing this many bytes of a packed list of numbers takes as long as parsing one field."""


def check_parts(encoded: bytes, descriptor: Descriptor) -> None:
    """Refuse a message with too many fields; the parser reports malformed bytes.

    A message of 16 MiB can contain eight million empty messages and take seconds to parse.

    Raises:
        InvalidArgument: the message has more than ``MAX_PARTS`` fields.
    """
    num_parts, kind, at, end = 0, descriptor, 0, len(encoded)
    outer: list[tuple[Descriptor, int]] = []
    while at < end or outer:
        if at >= end:
            kind, end = outer.pop()
            continue
        try:
            key, at = _varint(encoded, at)
            match key & 7:
                case 0:
                    _, at = _varint(encoded, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    length, at = _varint(encoded, at)
                    field = kind.fields_by_number.get(key >> 3)
                    if field is not None and field.message_type is not None:
                        outer.append((kind, end))
                        kind, end = field.message_type, min(at + length, end)
                    else:
                        at += length
                        if field is not None and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
                            num_parts += length // PACKED_BYTES
                case _:
                    return
        except IndexError:
            return
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise InvalidArgument(
                "request",
                f"must consist of at most {MAX_PARTS} fields, those of messages within it included",
                metadata={"limit": str(MAX_PARTS)},
            )


def _varint(encoded: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at ``at``, and the position after it.

    Raises:
        IndexError: it does not end within ten bytes or within the message.
    """
    value = 0
    for shift in range(0, 70, 7):
        byte = encoded[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError("a number has more than ten bytes")
