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
    """The ``Intake`` of all peers that send their blocks in messages."""

    transport = Transport.MESSAGES
    executor: Executor | None = None

    def frames(
        self, messages: Iterable[pb.BlockFrame], block_bytes: int, bare_bytes: int = 0, frame_bytes: int = 0
    ) -> Iterator[Frame]:
        """Yield the frames; see ``Intake.frames``."""
        return (self.frame(each, block_bytes, bare_bytes) for each in messages)

    def frame(self, message: pb.BlockFrame, block_bytes: int, bare_bytes: int = 0) -> Frame:
        """Return the frame with the bytes in the message, whose digest has been checked."""
        frame = frames.from_proto(message)
        if len(frame.payload) not in (block_bytes, bare_bytes or block_bytes):
            raise ProtocolError(f"block {frame.index} has {len(frame.payload)} bytes, not {block_bytes}")
        return frame


class MessagesOnly:
    """The ``Transports`` of a worker that shares nothing."""

    def __init__(self) -> None:
        self.offer = pb.SharedPool()
        self.allowed = frozenset({Transport.MESSAGES})

    async def choose(self, offer: pb.SharedPool) -> Intake:
        """Return the intake from messages, regardless of the offer."""
        return MESSAGES

    def close(self) -> None:
        """Do nothing, since no pools are shared."""


MESSAGES = Messages()
MESSAGES_ONLY = MessagesOnly()
