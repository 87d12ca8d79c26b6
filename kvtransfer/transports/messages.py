"""Reads blocks from the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.transports.interface import Intake
from quire.protos import kvtransfer_pb2 as pb


class Messages:
    """The ``Intake`` of one push or pull whose blocks come in messages."""

    transport = Transport.MESSAGES
    executor: Executor | None = None

    def __init__(self) -> None:
        self._pieces = bytearray()

    def frames(
        self, messages: Iterable[pb.BlockFrame], block_bytes: int, bare_bytes: int = 0, frame_bytes: int = 0
    ) -> Iterator[Frame]:
        """Yield the frames; see ``Intake.frames``."""
        for message in messages:
            # Each access to a bytes field copies it, so it is read once.
            payload: bytes | bytearray = message.payload
            if message.bytes_left or self._pieces:
                self._pieces += payload
                payload = self._pieces
            num_bytes = len(payload) + message.bytes_left
            if num_bytes not in (block_bytes, bare_bytes or block_bytes):
                raise ProtocolError(f"block {message.index} has {num_bytes} bytes, not {block_bytes}")
            if not message.bytes_left:
                self._pieces = bytearray()
                yield frames.from_proto(message, memoryview(payload))


class MessagesOnly:
    """The ``Transports`` of a worker that shares nothing."""

    def __init__(self) -> None:
        self.offer = pb.SharedPool()
        self.allowed = frozenset({Transport.MESSAGES})

    async def choose(self, offer: pb.SharedPool) -> Intake:
        """Return the intake from messages, regardless of the offer."""
        return Messages()

    def close(self) -> None:
        """Do nothing, since no pools are shared."""


MESSAGES_ONLY = MessagesOnly()
