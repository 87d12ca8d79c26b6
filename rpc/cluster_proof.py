"""Checks that workers and routers belong to the same cluster: they prove that they know the cluster secret.

``quire.rpc.proof`` computes the proofs of calls. This module contains the server's side of them, and the
check of a worker's description before a router sends it a prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.protos import worker_pb2
from quire.rpc.errors import InvalidArgument, ServiceError, Unauthenticated, Unavailable
from quire.rpc.interceptors import OwnCalls, refusal
from quire.rpc.loopback import REMEDY, is_loopback
from quire.rpc.proof import (
    ANSWER_KEY,
    CHALLENGE_KEY,
    PROOF_KEY,
    answer_proof,
    call_proof,
    is_equal,
    proof,
)

MAX_NONCE_CHARS = 64
WINDOW = 1 << 14
"""Number of counts that are remembered per caller; a call whose count lags further behind is treated as a
replay."""
MAX_CALLERS = 4096

_GUARDED = "/quire.v1."
# A router needs this call to learn the epoch for its proofs, so the call cannot require one. It reveals
# nothing about requests.
_OPEN = "/quire.v1.WorkerService/GetWorkerInfo"


def description_proof(secret: bytes, nonce: str, info: worker_pb2.GetWorkerInfoResponse) -> str:
    """Return a worker's proof of its description, for the router that chose the nonce.

    Raises:
        InvalidArgument: the nonce is too long.
    """
    if len(nonce) > MAX_NONCE_CHARS:
        raise InvalidArgument("nonce", f"must have at most {MAX_NONCE_CHARS} characters; got {len(nonce)}")
    return proof(secret, "worker", nonce, info.worker_id, info.role, info.epoch, info.address)


@dataclass(frozen=True, slots=True)
class ClusterTrust:
    """Lets a router distinguish the cluster's workers from strangers."""

    secret: bytes = field(default=b"", repr=False)
    has_tls: bool = False
    """Whether connections to workers use certificates of the cluster."""

    def is_proven(self, nonce: str, info: worker_pb2.GetWorkerInfoResponse) -> bool:
        """Return whether the worker that sent this description knows the secret; without a secret, True."""
        return not self.secret or is_equal(info.proof, description_proof(self.secret, nonce, info))

    def problem(
        self, address: str, nonce: str, info: worker_pb2.GetWorkerInfoResponse, *, is_named_by_operator: bool
    ) -> str | None:
        """Return why the worker that sent this description must not get prompts; None if it may.

        An address from Redis must equal the one in the worker's proof. Otherwise an intruder could pass the
        challenge on to a real worker and return that worker's proof. An address that the operator named may
        differ, because the worker may know itself by another name.
        """
        if not self.secret:
            if info.proof:
                return f"it has a cluster secret and this router has none: {REMEDY}"
            if not self.has_tls and not is_loopback(address.rpartition(":")[0]):
                return (
                    "it is on another machine, and without a cluster secret it may be a stranger: "
                    f"{REMEDY}, or use --cluster-cert, --cluster-key and --cluster-ca"
                )
            return None
        if not info.proof:
            return f"it did not prove that it knows the cluster secret; has it none? {REMEDY}"
        if not self.is_proven(nonce, info):
            return (
                f"its proof does not fit, since it has another cluster secret or is not who it says: {REMEDY}"
            )
        if not is_named_by_operator and info.address != address:
            return f"it passes on the proof of the worker at {info.address}, and is not that worker"
        return None


class RequireProof(OwnCalls):
    """Admits only calls that prove the cluster secret, and answers their challenges.

    Health, reflection and services outside ``quire.v1`` are not guarded.

    Args:
        epoch: epoch of this worker.
        address: returns the address (host:port) at which others reach this worker.
    """

    def __init__(self, secret: bytes, epoch: str, address: Callable[[], str]) -> None:
        self._secret = secret
        self._epoch = epoch
        self._address = address
        self._seen = SeenCounts()

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the call's handler, or a handler that refuses the call before its request is read."""
        method = details.method
        if not method.startswith(_GUARDED) or method == _OPEN:
            return handler
        metadata = {key: value for key, value in details.invocation_metadata or ()}
        try:
            self._check(method, str(metadata.get(PROOF_KEY, "")))
        except ServiceError as error:
            return refusal(error)
        challenge = metadata.get(CHALLENGE_KEY)
        if challenge is None:
            return handler
        answer = answer_proof(self._secret, str(challenge), self._epoch, self._address())
        return _answering(handler, ((ANSWER_KEY, answer),))

    def _check(self, method: str, given: str) -> None:
        if not given:
            raise Unauthenticated(
                f"this worker takes calls of its cluster only, and this call proves nothing: {REMEDY}",
                reason="NO_CLUSTER_PROOF",
            )
        epoch, caller, count, mac = [*given.split(" "), "", "", "", ""][:4]
        if epoch != self._epoch:
            raise Unavailable(
                "the call is for a worker of another epoch: this worker has restarted", reason="RESTARTED"
            )
        if not is_equal(mac, call_proof(self._secret, method, epoch, caller, count)):
            raise Unauthenticated(
                f"the call's proof is not of this worker's cluster secret: {REMEDY}",
                reason="WRONG_CLUSTER_PROOF",
            )
        if not self._seen.add(caller, int(count)):
            raise Unavailable("the call's proof was used before, or is too old", reason="REPLAYED")


class SeenCounts:
    """Remembers the latest ``WINDOW`` counts that each of the latest ``MAX_CALLERS`` callers has used.

    Only counts of callers that know the secret are added, so strangers cannot fill it.
    """

    def __init__(self) -> None:
        self._callers: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Highest count by caller, and a bit mask of used counts: bit i represents the highest count - i."""

    def add(self, caller: str, count: int) -> bool:
        """Record a caller's count; return False if it was used before, or is too old to know."""
        highest, bits = self._callers.get(caller, (0, 0))
        if count > highest:
            ahead = count - highest
            bits = ((bits << ahead) & ((1 << WINDOW) - 1) if ahead < WINDOW else 0) | 1
            highest = count
        else:
            behind = highest - count
            if behind >= WINDOW or bits >> behind & 1:
                return False
            bits |= 1 << behind
        self._callers[caller] = (highest, bits)
        self._callers.move_to_end(caller)
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)
        return True


def _answering(handler: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
    """Return a handler that sends ``metadata`` first. ``RequestIntake`` made all requests streams."""

    async def single(requests: AsyncIterator[bytes], context: Any) -> Any:
        await context.send_initial_metadata(metadata)
        return await handler.stream_unary(requests, context)

    async def streaming(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(metadata)
        async with aclosing(handler.stream_stream(requests, context)) as responses:
            async for response in responses:
                yield response

    if handler.response_streaming:
        return handler._replace(stream_stream=streaming)
    return handler._replace(stream_unary=single)
