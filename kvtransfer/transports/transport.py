"""Names the transports, in settings and metrics and on the wire."""

from __future__ import annotations

from enum import StrEnum

from quire.kvtransfer.errors import ProtocolError
from quire.protos import kvtransfer_pb2 as pb


class Transport(StrEnum):
    """How the bytes of blocks reach a receiver; the values are the names in settings, metrics and logs."""

    MESSAGES = "messages"
    SHARED = "shared"
    NIXL = "nixl"

    @property
    def on_wire(self) -> pb.Transport:
        """The transport's value in messages."""
        value: pb.Transport = getattr(pb, f"TRANSPORT_{self.name}")
        return value

    @classmethod
    def from_wire(cls, value: pb.Transport) -> Transport:
        """Return the transport that a message names."""
        for transport in cls:
            if transport.on_wire == value:
                return transport
        raise ProtocolError(f"the other worker names a transport, {value}, that does not exist")
