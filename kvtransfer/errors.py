"""What can go wrong when blocks move, and the gRPC status that says so."""

from __future__ import annotations

import grpc


class TransferError(Exception):
    """A transfer failed; the sequence was not admitted and its blocks are free."""

    code = grpc.StatusCode.ABORTED


class LayoutMismatchError(TransferError):
    """Sender and receiver lay out blocks differently, or serve different models."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnknownTicketError(TransferError):
    """The ticket was never issued, was used, or its request has ended."""

    code = grpc.StatusCode.NOT_FOUND


class StaleEpochError(TransferError):
    """The ticket was issued before the receiver restarted."""


class StaleAttemptError(TransferError):
    """The push belongs to an attempt that the router has given up."""


class ProtocolError(TransferError):
    """The sender broke the order, the range or the credit of the push."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class DigestMismatchError(TransferError):
    """A block's bytes, or its hash, are not what the sender meant to send."""

    code = grpc.StatusCode.DATA_LOSS


class PushFailedError(TransferError):
    """The receiver refused or lost the push.

    Attributes:
        status: the receiver's gRPC status.
    """

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
