"""What can go wrong when blocks move, and the gRPC status that says so."""

from __future__ import annotations

from typing import ClassVar

import grpc


class TransferError(Exception):
    """A transfer failed; nothing of it is left at the receiver.

    Attributes:
        code: the gRPC status that tells the other end.
        reason: the failure's label in the metrics.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.ABORTED
    reason: ClassVar[str] = "aborted"


class LayoutMismatchError(TransferError):
    """Sender and receiver lay out blocks differently, or serve different models."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "layout_mismatch"


class UnknownTicketError(TransferError):
    """The ticket was never issued, was used, or its request has ended."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "unknown_ticket"


class UnknownLeaseError(TransferError):
    """The lease was released, has expired, or was never given."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "unknown_lease"


class StaleEpochError(TransferError):
    """The ticket, or what is known of a holder's blocks, is from before that worker restarted."""

    reason = "stale_epoch"


class StaleAttemptError(TransferError):
    """The push belongs to an attempt that the router has given up."""

    reason = "stale_attempt"


class ProtocolError(TransferError):
    """The sender broke the order, the range or the credit of the push."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "protocol"


class NoBlocksError(TransferError):
    """The receiver has no blocks for the push, and cannot have any while it waits."""

    reason = "no_blocks"


class DigestMismatchError(TransferError):
    """A block's bytes, or its hash, are not what the sender meant to send."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "digest_mismatch"


class SenderGoneError(TransferError):
    """The sender cancelled, vanished or ran out of time before it committed."""

    code = grpc.StatusCode.CANCELLED
    reason = "sender_gone"


class PushFailedError(TransferError):
    """The receiver refused or lost the push.

    Attributes:
        status: the receiver's gRPC status.
    """

    reason = "push_failed"

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status


class PullFailedError(TransferError):
    """The holder refused or lost the pull.

    Attributes:
        status: the holder's gRPC status.
    """

    reason = "pull_failed"

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
