"""The layout of a block, which both ends of a transfer compare before any byte moves."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from quire.kvtransfer.errors import LayoutMismatchError
from quire.protos import kvtransfer_pb2

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}
_SCALE_BYTES = 4
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a KV block, ``[num_layers, 2, num_kv_heads, block_size, head_dim]``, and its origin.

    Attributes:
        dtype: the type of the stored values.
        model_digest: digest of the model's configuration and weights.
        compute_dtype: the type that the model computes in.
        device: the kind of device that the model runs on, "cpu" or "cuda".
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    model_digest: str
    compute_dtype: str
    device: str

    @property
    def block_bytes(self) -> int:
        """Bytes of one block.

        A block of 8-bit values ends with a scale for each layer, K or V, and KV head.
        """
        num_rows = self.num_layers * 2 * self.num_kv_heads
        num_bytes = num_rows * self.block_size * self.head_dim * _ITEM_BYTES[self.dtype]
        if _ITEM_BYTES[self.dtype] > 1:
            return num_bytes
        return _aligned(_aligned(num_bytes) + num_rows * _SCALE_BYTES)

    def to_proto(self) -> kvtransfer_pb2.KvLayout:
        """Return the wire form."""
        return kvtransfer_pb2.KvLayout(**asdict(self))

    @classmethod
    def from_proto(cls, message: kvtransfer_pb2.KvLayout) -> KvLayout:
        """Read the wire form."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def require_equal(ours: KvLayout, theirs: KvLayout) -> None:
    """Raise LayoutMismatchError, which names each field that differs, unless the layouts are equal."""
    differences = [
        f"{name} is {value} here and {theirs_value} there"
        for (name, value), theirs_value in zip(asdict(ours).items(), asdict(theirs).values(), strict=True)
        if value != theirs_value
    ]
    if differences:
        raise LayoutMismatchError(
            "; ".join(differences) + ": start both workers with the same model and options"
        )
