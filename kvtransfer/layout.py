"""The wire form of a block's layout, and its comparison by both ends of a transfer."""

from __future__ import annotations

from dataclasses import asdict, fields

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import LayoutMismatchError
from quire.protos import kvtransfer_pb2


def layout_to_proto(layout: KvLayout) -> kvtransfer_pb2.KvLayout:
    """Return the wire form of a layout."""
    return kvtransfer_pb2.KvLayout(**asdict(layout))


def layout_from_proto(message: kvtransfer_pb2.KvLayout) -> KvLayout:
    """Return the layout that a message describes."""
    values = {field.name: getattr(message, field.name) for field in fields(KvLayout)}
    return KvLayout(**{**values, "window_layers": tuple(message.window_layers)})


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
