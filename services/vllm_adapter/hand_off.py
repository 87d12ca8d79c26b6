"""What a gateway carries from the prefill worker's answer to the decode worker's request.

A gateway passes it on unread. Its members are those with which vLLM's NIXL connector names an engine; whoever
holds it can learn of a prompt's blocks only by their hashes, which take the prompt and the cluster's secret.
"""

from __future__ import annotations

import json
from typing import Any

from quire.protos import worker_pb2
from quire.services.errors import InvalidArgument

FIELD = "kv_transfer_params_json"


def hand_off(address: str, epoch: str, num_blocks: int) -> str:
    """Return where a prompt's blocks are."""
    host, _, port = address.rpartition(":")
    return json.dumps(
        {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": epoch,
            "remote_host": host,
            "remote_port": int(port),
            "remote_num_blocks": num_blocks,
        }
    )


def pull_source(request: Any) -> worker_pb2.PullSource | None:
    """Return where a ``GenerateRequest`` says that its prompt's blocks are; None if it does not.

    Raises:
        InvalidArgument: it is not what ``hand_off`` returned.
    """
    if not request.HasField(FIELD):
        return None
    try:
        members: Any = json.loads(request.kv_transfer_params_json)
    except ValueError as error:
        raise InvalidArgument(FIELD, f"must be JSON: {error}") from error
    if not isinstance(members, dict):
        raise InvalidArgument(FIELD, "must be a JSON object")
    if not members.get("do_remote_prefill"):
        return None
    host, epoch = (_text(members, name) for name in ("remote_host", "remote_engine_id"))
    port, num_blocks = (_number(members, name) for name in ("remote_port", "remote_num_blocks"))
    return worker_pb2.PullSource(address=f"{host}:{port}", epoch=epoch, num_blocks=num_blocks)


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
