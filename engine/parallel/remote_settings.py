"""What a rank on another machine gets to know from rank 0, and what it answers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version

from quire.engine.parallel.collectives import SharedSizes


@dataclass(frozen=True)
class RemoteSettings:
    """The settings of a rank.

    Attributes:
        quire_version: that of rank 0.
        model: folder or hub id of the model; None means the bundled demo.
        sizes: the sizes of each rank's memory for sums.
    """

    rank: int
    quire_version: str
    sizes: SharedSizes
    model: str | None
    dtype: str
    block_size: int
    kv_cache_dtype: str

    def to_json(self) -> bytes:
        """Return the settings as text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, text: bytes | bytearray) -> RemoteSettings:
        """Return the settings that a text contains.

        Raises:
            ValueError: the text comes from another version of quire.
        """
        values = json.loads(text)
        own, other = own_version(), values.get("quire_version")
        if other != own:
            raise ValueError(f"this machine has quire {own}, and the worker's has {other}: install the same")
        return cls(**{**values, "sizes": SharedSizes(**values["sizes"])})


@dataclass(frozen=True)
class LoadedPart:
    """What a rank has loaded.

    Attributes:
        digest: digest of the whole model in this rank's files.
        first_head, end_head: its KV heads.
    """

    digest: str
    first_head: int
    end_head: int

    def to_json(self) -> bytes:
        """Return this as text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, text: bytes | bytearray) -> LoadedPart:
        """Return what a text contains."""
        return cls(**json.loads(text))

    @property
    def heads(self) -> range:
        """The rank's KV heads."""
        return range(self.first_head, self.end_head)


def own_version() -> str:
    """Return the version of quire in this process."""
    return version("quire-llm")
