"""What a rank on this machine needs to know at its start."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from quire.engine.parallel.collectives import SharedSizes


@dataclass(frozen=True)
class RankSettings:
    """The settings of a rank process.

    Attributes:
        model: the model's folder.
        num_threads: threads of each rank.
        sizes: the sizes of the shared memory.
        memory, pool, control, life: file descriptors of the shared memory, of the KV blocks, of the pipe with
            messages for this rank, and of a pipe that closes when rank 0 ends.
    """

    rank: int
    model: str
    dtype: str
    weight_dtype: str
    block_size: int
    kv_cache_dtype: str
    num_threads: int
    sizes: SharedSizes
    memory: int
    pool: int
    control: int
    life: int

    def to_json(self) -> str:
        """Return the settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> RankSettings:
        """Return the settings that a text contains."""
        values = json.loads(text)
        return cls(**{**values, "sizes": SharedSizes(**values["sizes"])})
