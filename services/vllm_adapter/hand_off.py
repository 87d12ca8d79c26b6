"""Defines the hand-off that a gateway copies from a prefill worker's answer to a decode worker's request.

The gateway passes it on without reading it. It has the members with which vLLM's NIXL connector names an
engine, and a proof. Without the proof, a client behind a gateway could name its own machine, and the
decode worker would copy blocks from there into the cache that all requests share.
"""

from __future__ import annotations

import json
from typing import Any

from quire.protos import worker_pb2
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.errors import InvalidArgument
from quire.rpc.loopback import REMEDY, is_loopback
from quire.rpc.proof import is_equal, proof

FIELD = "kv_transfer_params_json"


def hand_off(address: str, epoch: str, num_blocks: int, secret: bytes, num_cached_tokens: int = 0) -> str:
    """Return the JSON that names the worker which has a prompt's blocks, with a proof.

    Args:
        num_cached_tokens: number of prompt tokens that the prefill worker did not have to compute.
    """
    host, _, port = address.rpartition(":")
    return json.dumps(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": epoch,
            "remote_host": host,
            "remote_port": int(port),
            "remote_num_blocks": num_blocks,
            "remote_num_cached_tokens": num_cached_tokens,
            "remote_proof": _proof(secret, address, epoch) if secret else "",
        }
    )


def has_hand_off(request: Any) -> bool:
    """Return whether a ``GenerateRequest`` carries the hand-off of a prefill worker.

    Raises:
        InvalidArgument: the hand-off is malformed.
    """
    return _members(request) is not None


def pull_source(request: Any, trust: ClusterTrust) -> worker_pb2.PullSource | None:
    """Return the worker from which to pull the blocks of a ``GenerateRequest``; None without a hand-off.

    Raises:
        InvalidArgument: the hand-off does not come from a worker of this cluster.
    """
    members = _members(request)
    if members is None:
        return None
    host, epoch = (_text(members, name) for name in ("remote_host", "remote_engine_id"))
    port, num_blocks = (_number(members, name) for name in ("remote_port", "remote_num_blocks"))
    address = f"{host}:{port}"
    if trust.secret:
        if not is_equal(str(members.get("remote_proof", "")), _proof(trust.secret, address, epoch)):
            raise InvalidArgument(
                FIELD,
                f"{address} is not proved to be a worker of this cluster: pass on what the prefill worker "
                f"returned, and {REMEDY}",
            )
    elif not trust.has_tls and not is_loopback(host):
        raise InvalidArgument(
            FIELD, f"{address} is on another machine, and this worker has no cluster secret: {REMEDY}"
        )
    return worker_pb2.PullSource(address=address, epoch=epoch, num_blocks=num_blocks)


def num_cached_tokens(request: Any, num_found: int) -> int:
    """Return how many prompt tokens were not computed for a ``GenerateRequest``, on either worker.

    Args:
        num_found: number that the decode worker found or pulled, most of them just computed for the request.
    """
    members = _members(request)
    return num_found if members is None else min(num_found, _number(members, "remote_num_cached_tokens"))


def _members(request: Any) -> dict[str, Any] | None:
    if not request.HasField(FIELD):
        return None
    try:
        members: Any = json.loads(request.kv_transfer_params_json)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(FIELD, f"must be JSON: {error}") from error
    if not isinstance(members, dict):
        raise InvalidArgument(FIELD, "must be a JSON object")
    return members if members.get("do_remote_prefill") else None


def _proof(secret: bytes, address: str, epoch: str) -> str:
    return proof(secret, "hand-off", address, epoch)


def _text(members: dict[str, Any], name: str) -> str:
    value = members.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidArgument(FIELD, f"{name} must be the text that a prefill worker gave")
    return value


def _number(members: dict[str, Any], name: str) -> int:
    value = members.get(name)
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise InvalidArgument(FIELD, f"{name} must be the number that a prefill worker gave")
    return value
