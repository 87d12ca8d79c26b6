"""Proofs that a process knows the cluster secret, without revealing it.

::

    call     HMAC-SHA256(secret, domain | "call"   | method | callee's epoch | caller | count)
    answer   HMAC-SHA256(secret, domain | "answer" | challenge | callee's epoch | callee's address)

A caller signs each call. The epoch changes with each start of a worker, so a proof is valid only for one
start of one worker. The count makes it valid only once. The callee answers the caller's challenge. The answer
contains the callee's address, so an intruder at another address cannot pass on a worker's answer. Each kind
of proof has its own tag, so a proof cannot be sent back to the process that made it.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import secrets
import struct
from collections.abc import Callable
from typing import Any

import grpc.aio

from quire.rpc.loopback import REMEDY

PROOF_KEY = "quire-proof"
CHALLENGE_KEY = "quire-challenge"
ANSWER_KEY = "quire-answer"

_DOMAIN = b"quire-proof-1"
_ANSWERED = frozenset(
    {
        "/quire.v1.WorkerService/Decode",
        "/quire.v1.WorkerService/StreamOutputs",
        "/quire.v1.WorkerService/Prefill",
        "/quire.v1.WorkerService/Abort",
        "/quire.v1.WorkerService/WatchWorker",
        "/quire.v1.KvTransferService/Push",
        "/quire.v1.KvPullService/Pin",
        "/quire.v1.KvPullService/Pull",
    }
)
"""Calls that send blocks or whose results are used. Their callers check the callee's answer."""

_CHALLENGE_BYTES = 16
_CALLER_BYTES = 8


def proof(secret: bytes, kind: str, *parts: str) -> str:
    """Return the HMAC of the parts in hexadecimal digits; a proof is valid only for its ``kind`` of use."""
    encoded = [part.encode() for part in (kind, *parts)]
    message = b"".join([_DOMAIN, *(struct.pack("<I", len(part)) + part for part in encoded)])
    return hmac.digest(secret, message, "sha256").hex()


def call_proof(secret: bytes, method: str, epoch: str, caller: str, count: str) -> str:
    """Return the proof of a call to the worker that has this epoch."""
    return proof(secret, "call", method, epoch, caller, count)


def answer_proof(secret: bytes, challenge: str, epoch: str, address: str) -> str:
    """Return the proof by which the worker with this epoch and address answers a challenge."""
    return proof(secret, "answer", challenge, epoch, address)


def new_challenge() -> str:
    """Return an unpredictable random text."""
    return secrets.token_hex(_CHALLENGE_BYTES)


def is_equal(given: str, expected: str) -> bool:
    """Return whether two proofs are equal, in constant time; ``given`` may be any text."""
    return hmac.compare_digest(given.encode(), expected.encode())


class Caller:
    """Signs the calls of one process; without a secret it signs nothing."""

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret
        self._name = secrets.token_hex(_CALLER_BYTES)
        self._counts = itertools.count(1)

    def sign(self, method: str, epoch: str) -> str:
        """Return the value of ``PROOF_KEY`` for one call to the worker that has this epoch."""
        count = str(next(self._counts))
        return f"{epoch} {self._name} {count} {call_proof(self.secret, method, epoch, self._name, count)}"


class Peer:
    """Signs each call to one worker, and checks who answers. A stub accepts it instead of a channel.

    Args:
        address: the worker's address as the worker itself states it.
    """

    def __init__(self, channel: grpc.aio.Channel, caller: Caller, address: str, epoch: str) -> None:
        self.channel = channel
        self.address = address
        self.epoch = epoch
        self._caller = caller
        self._challenge = new_challenge()
        self._answer = answer_proof(caller.secret, self._challenge, epoch, address)

    def unary_unary(self, method: str, **options: Any) -> Callable[..., Any]:
        """Return a call that is signed; see ``grpc.aio.Channel``."""
        return self._signed(method, self.channel.unary_unary(method, **options))

    def unary_stream(self, method: str, **options: Any) -> Callable[..., Any]:
        """Return a call that is signed; see ``grpc.aio.Channel``."""
        return self._signed(method, self.channel.unary_stream(method, **options))

    def stream_stream(self, method: str, **options: Any) -> Callable[..., Any]:
        """Return a call that is signed; see ``grpc.aio.Channel``."""
        return self._signed(method, self.channel.stream_stream(method, **options))

    async def check(self, call: Any) -> None:
        """Wait until the callee has proved that it is this peer, or the call has failed for another reason.

        Only the calls that move blocks, prompts or tokens carry a proof and can be checked.

        Raises:
            grpc.aio.AioRpcError: UNAUTHENTICATED; the call was cancelled.
        """
        if not self._caller.secret:
            return
        try:
            answer = (await call.initial_metadata()).get(ANSWER_KEY) or ""
        except asyncio.CancelledError:
            call.cancel()
            raise
        if is_equal(str(answer), self._answer):
            return
        if call.done() and await call.code() is not grpc.StatusCode.OK:
            return
        call.cancel()
        raise grpc.aio.AioRpcError(
            code=grpc.StatusCode.UNAUTHENTICATED,
            initial_metadata=grpc.aio.Metadata(),
            trailing_metadata=grpc.aio.Metadata(),
            details=f"{self.address} did not prove that it is a worker of this cluster: {REMEDY}",
            debug_error_string="",
        )

    def _signed(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if not self._caller.secret:
            return call

        challenge = ((CHALLENGE_KEY, self._challenge),) if method in _ANSWERED else ()

        def signed(*request: Any, metadata: Any = (), **options: Any) -> Any:
            proved = (PROOF_KEY, self._caller.sign(method, self.epoch))
            return call(*request, metadata=(*(metadata or ()), proved, *challenge), **options)

        return signed
