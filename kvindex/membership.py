"""What a worker says of itself in its lease."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A live worker.

    Attributes:
        worker_id: unique name.
        role: "prefill" or "decode".
        address: host:port of its gRPC services.
        epoch: changes with each start of the process.
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
        """Read the stored form.

        Raises:
            ValueError: it is malformed.
        """
        try:
            return cls(**json.loads(stored))
        except TypeError as error:
            raise ValueError(f"malformed worker record: {error}") from error
