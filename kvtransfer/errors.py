"""Errors of block transfers. Each has the gRPC status that reports it to the other end."""

from __future__ import annotations

from typing import ClassVar

import grpc


class TransferError(Exception):
    """A transfer failed; the receiver has discarded all of it.

    Attributes:
        code: the gRPC status that is sent to the other end.
        reason: the failure's label in the metrics.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.ABORTED
    reason: ClassVar[str] = "aborted"


class LayoutMismatchError(TransferError):
    """Sender and receiver lay out blocks differently, or serve different models."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "layout_mismatch"


class NotSharedError(TransferError):
    """The blocks of the other worker cannot be mapped here; the message says why."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "not_shared"


class UnknownTicketError(TransferError):
    """The ticket was never issued, was used, or its request has ended."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "unknown_ticket"


class UnknownLeaseError(TransferError):
    """The lease was released, has expired, or never existed."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "unknown_lease"


class StaleEpochError(TransferError):
    """The worker has restarted since it issued the ticket, or since its blocks became known."""

    reason = "stale_epoch"


class StaleAttemptError(TransferError):
    """The push belongs to an attempt that the router has abandoned."""

    reason = "stale_attempt"


class ProtocolError(TransferError):
    """The sender broke the order, the range or the credit of the push."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "protocol"


class NoBlocksError(TransferError):
    """The receiver has no free blocks for the push, and waiting cannot free any."""

    reason = "no_blocks"


class BadBlockError(TransferError):
    """A block arrived exactly as it was sent, but no tokens can have these keys and values."""

    code = grpc.StatusCode.DATA_LOSS
    reason = "bad_block"


class DigestMismatchError(TransferError):
    """A block's bytes or its hash differ from those for which the sender computed the digest."""

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
