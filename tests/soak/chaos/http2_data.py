"""Finds the large DATA frames in one direction of an HTTP/2 connection: those that carry KV blocks.

The frames are those of RFC 9113, section 4.1: a header of nine bytes (length, type, flags, stream), then the
payload. A client's bytes begin with a preface.
"""

from __future__ import annotations

_PREFACE_BYTES = 24
_HEADER_BYTES = 9
_DATA = 0
LARGE_BYTES = 2048
"""A frame of this many bytes is mostly the values of a block: tickets, tokens and messages are smaller."""
MARGIN_BYTES = 64
"""Bytes at the beginning of a frame that are left out: headers of the message and of its first block."""


class LargeDataFinder:
    """Follows the frames of one direction, in chunks of any size.

    Args:
        is_from_client: whether this is the direction from the client to the server.
    """

    def __init__(self, *, is_from_client: bool) -> None:
        self._num_skipped = _PREFACE_BYTES if is_from_client else 0
        self._header = b""
        self._num_left = 0
        self._first = 0
        """Bytes of the frame before the part that counts; negative: no part of the frame counts."""

    def find(self, chunk: bytes) -> list[range]:
        """Return the parts of the next chunk that belong to large DATA frames, as positions in the chunk."""
        found, at = [], min(self._num_skipped, len(chunk))
        self._num_skipped -= at
        while at < len(chunk):
            if not self._num_left:
                at += self._read_header(chunk[at:])
                continue
            num = min(self._num_left, len(chunk) - at)
            if self._first >= 0:
                part = range(at + min(self._first, num), at + num)
                self._first = max(0, self._first - num)
                if part:
                    found.append(part)
            self._num_left -= num
            at += num
        return found

    def _read_header(self, rest: bytes) -> int:
        """Take bytes of a frame's header; return their number."""
        num = min(_HEADER_BYTES - len(self._header), len(rest))
        self._header += rest[:num]
        if len(self._header) == _HEADER_BYTES:
            self._num_left = int.from_bytes(self._header[:3], "big")
            is_large = self._header[3] == _DATA and self._num_left >= LARGE_BYTES
            self._first = MARGIN_BYTES if is_large else -1
            self._header = b""
        return num
