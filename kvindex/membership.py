"""What a worker says of itself in its lease."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

logger = logging.getLogger("quire.kvindex")

POLL_SECONDS = 1.0
"""How often a router looks who holds a lease."""

_KINDS = {"str": str, "bool": bool}


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A live worker.

    Attributes:
        worker_id: unique name; two processes with one name end each other's leases without end.
        role: "prefill" or "decode".
        address: host:port of its gRPC services.
        epoch: changes with each start of the process; the epoch of its index entries is another one.
        fingerprint: see ``block_hash.fingerprint``.
        is_draining: it finishes what it has and takes nothing new.
    """

    worker_id: str
    role: str
    address: str
    epoch: str
    fingerprint: str
    is_draining: bool = False

    def to_json(self) -> bytes:
        """Return the stored form."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, stored: bytes) -> WorkerRecord:
        """Read the stored form; fields of a newer version are passed over.

        Raises:
            ValueError: it is malformed.
        """
        values = json.loads(stored)
        if not isinstance(values, dict):
            raise ValueError("malformed worker record: not an object")
        known = {field.name: field.type for field in fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        for name, value in values.items():
            if type(value) is not _KINDS[str(known[name])]:
                raise ValueError(f"malformed worker record: {name} is {value!r}")
        try:
            record = cls(**values)
        except TypeError as error:
            raise ValueError(f"malformed worker record: {error}") from error
        if record.role not in ("prefill", "decode"):
            raise ValueError(f"malformed worker record: role is {record.role!r}")
        return record


def read_records(stored: Iterable[bytes]) -> list[WorkerRecord]:
    """Read what can be read: one worker's nonsense must not hide the others."""
    records = []
    for each in stored:
        try:
            records.append(WorkerRecord.from_json(each))
        except ValueError as error:
            logger.warning("worker_record_malformed", extra={"fields": {"error": str(error)}})
    return records
