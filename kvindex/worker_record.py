"""Defines the record that a worker stores with its lease to describe itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

logger = logging.getLogger("quire.kvindex")

POLL_SECONDS = 1.0
"""Interval at which a router reads which workers have a lease."""

ROLES = ("prefill", "decode")

_KINDS = {"str": str, "bool": bool}


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A live worker.

    Attributes:
        worker_id: unique name. Two processes with the same name would repeatedly end each other's leases.
        role: the present role, one of ``ROLES``.
        address: host:port of the worker's gRPC services.
        epoch: identifies this start of the process. It is not the epoch of its index entries.
        fingerprint: see ``block_hash.fingerprint``.
        is_draining: whether the worker finishes its requests and accepts no new ones.
    """

    worker_id: str
    role: str
    address: str
    epoch: str
    fingerprint: str
    is_draining: bool = False

    def to_json(self) -> bytes:
        """Return the record as JSON, as it is stored."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, stored: bytes) -> WorkerRecord:
        """Return the record that was stored; fields of a newer version are ignored.

        Raises:
            ValueError: the record is malformed.
        """
        try:
            values = json.loads(stored)
        except RecursionError as error:
            raise ValueError("malformed worker record: nested too deeply") from error
        if not isinstance(values, dict):
            raise ValueError("malformed worker record: not an object")
        known = {field.name: field.type for field in fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        for name, value in values.items():
            if type(value) is not _KINDS[str(known[name])]:
                raise ValueError(f"malformed worker record: {name} is {value!r}")
            if isinstance(value, str):
                value.encode()  # JSON may have half of a surrogate pair, which UTF-8 and gRPC cannot have
        try:
            record = cls(**values)
        except TypeError as error:
            raise ValueError(f"malformed worker record: {error}") from error
        if record.role not in ROLES:
            raise ValueError(f"malformed worker record: role is {record.role!r}")
        return record


def read_records(stored: Iterable[bytes]) -> list[WorkerRecord]:
    """Return the records that can be read. A malformed record is logged and must not hide the others."""
    records = []
    for each in stored:
        try:
            records.append(WorkerRecord.from_json(each))
        except ValueError as error:
            logger.warning("worker_record_malformed", extra={"fields": {"error": str(error)}})
    return records
