"""Decides which workers a router accepts: those of its cluster whose requests it can check and tokenize.

Workers of several revisions may join, as in an update: the router checks and tokenizes a request before it
chooses the workers. So all that this depends on must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from quire.kvindex.worker_record import ROLES
from quire.protos import worker_pb2
from quire.rpc.cluster_proof import ClusterTrust
from quire.services.router.workers.membership import Member
from quire.services.router.workers.probe import Probe
from quire.services.router.workers.worker import can_continue
from quire.services.server.log import EventLogger

_MUST_BE_EQUAL = ("model", "max_model_len", "vocab_size", "eos_token_ids", "text_digest", "embedding")

_log = EventLogger("router")


class Acceptance:
    """Accepts workers by their proof, their role, and the description of the first worker.

    Args:
        trust: distinguishes the cluster's workers from strangers.
        expected_fingerprint: returns the fingerprint that a worker with a given cache descriptor must have;
            None: any fingerprint is accepted.

    Attributes:
        reference: description of the first worker that joined; None until one has joined.
    """

    def __init__(self, trust: ClusterTrust, expected_fingerprint: Callable[[bytes], str] | None) -> None:
        self._trust = trust
        self._expected_fingerprint = expected_fingerprint
        self._refused: dict[str, str] = {}
        """Last logged reason for refusing the worker at each address."""
        self.reference: worker_pb2.GetWorkerInfoResponse | None = None

    def joined(self, info: worker_pb2.GetWorkerInfoResponse) -> None:
        """Record that a worker has joined; later workers must match the first one.

        Another arithmetic may come from an update, or from machines that were meant to compute the same bits.
        """
        if self.reference is None:
            self.reference = info
        elif self.reference.cache_descriptor != info.cache_descriptor and can_continue(
            info, self.reference.cache_descriptor
        ):
            names = info.layout.arithmetic, self.reference.layout.arithmetic
            _log.warning(
                "worker_has_other_arithmetic", worker=info.worker_id, details=_other_arithmetic(*names)
            )

    def forget_all_but(self, addresses: Set[str]) -> None:
        """Forget the refused workers at other addresses, so that they are logged when they return."""
        self._refused = {at: problem for at, problem in self._refused.items() if at in addresses}

    def accepts(self, member: Member, probe: Probe) -> bool:
        """Return whether a worker may join; log the reason if it may not, once for each reason."""
        info = probe.info
        # First check the proof: the description of an unproven worker cannot be trusted.
        is_named_by_operator = member.fingerprint is None
        problem = self._trust.problem(
            member.address, probe.nonce, info, is_named_by_operator=is_named_by_operator
        ) or self._mismatch(member, info)
        if problem is None:
            self._refused.pop(member.address, None)
            return True
        if self._refused.get(member.address) != problem:
            self._refused[member.address] = problem
            _log.error("worker_refused", worker=info.worker_id, address=member.address, problem=problem)
        return False

    def _mismatch(self, member: Member, info: worker_pb2.GetWorkerInfoResponse) -> str | None:
        if info.role not in ROLES:
            return f"its role is {info.role!r}, neither prefill nor decode"
        if (reference := self.reference) is not None:
            pairs = {name: (getattr(reference, name), getattr(info, name)) for name in _MUST_BE_EQUAL}
            pairs["block_size"] = reference.layout.block_size, info.layout.block_size
            if info.cache_descriptor == reference.cache_descriptor:
                pairs["layout"] = reference.layout, info.layout
            for name, (ours, its) in pairs.items():
                if ours != its:
                    return (
                        f"its {name} is {its!r}, the first worker's is {ours!r}: "
                        "start a router with its own Redis for workers that differ in this"
                    )
        if self._expected_fingerprint is not None and member.fingerprint is not None:
            expected = self._expected_fingerprint(info.cache_descriptor)
            if member.fingerprint != expected:
                return "its block hashes differ from ours: give all services the same cluster secret"
        return None


def _other_arithmetic(its: str, ours: str) -> str:
    """Say that a worker's arithmetic is not that of the first worker, and what to do."""
    have_equal_libraries = its.partition("/")[2] == ours.partition("/")[2]
    remedy = (
        "--arithmetic portable"
        if have_equal_libraries
        else "one version of torch and transformers on processors of one kind"
    )
    return (
        f"its arithmetic is {its}, the first worker's is {ours}, so they share no blocks: start all workers "
        f"with {remedy}, or make a cluster for each arithmetic; in an update, nothing needs to be done"
    )
