"""What a worker says it is: equal only for workers whose blocks are interchangeable, and never the secret."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.layout import layout_from_proto
from quire.protos import worker_pb2
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.state import WorkerState

LAYOUT = KvLayout(2, 2, 4, 8, "float16", "digest", "float16", "float32-1")
IDENTITY = WorkerIdentity(
    worker_id="w",
    epoch="epoch",
    model="tiny",
    model_path="/models/tiny",
    layout=LAYOUT,
    num_blocks=100,
    max_model_len=64,
    vocab_size=320,
    eos_token_ids=frozenset({5, 1}),
    cluster_secret=b"very secret",
)
SCOPE = worker_pb2.CacheScope(tenant="tenant", salt="salt")


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        ({"worker_id": "x", "epoch": "e2", "num_blocks": 7, "model": "other"}, True),
        ({"layout": replace(LAYOUT, dtype="int8")}, False),
        ({"layout": replace(LAYOUT, model_digest="other")}, False),
        ({"cluster_secret": b"another"}, False),
        ({"cluster_secret": b""}, False),
    ],
)
def test_blocks_are_interchangeable_by_layout_and_secret(change: dict[str, Any], is_equal: bool) -> None:
    other = replace(IDENTITY, **change)
    assert (other.fingerprint == IDENTITY.fingerprint) == is_equal
    assert (other.root_hash(SCOPE) == IDENTITY.root_hash(SCOPE)) == is_equal


def test_scopes_share_no_blocks() -> None:
    parts = [("tenant", "salt", ""), ("tenant", "", ""), ("", "salt", ""), ("", "", "salt"), ("", "", "")]
    scopes = [worker_pb2.CacheScope(tenant=t, salt=s, adapter=a) for t, s, a in parts]
    assert len({IDENTITY.root_hash(scope) for scope in scopes}) == len(scopes)


def test_nothing_that_the_worker_sends_has_the_secret() -> None:
    state = WorkerState("prefill")
    state.set_draining(True)
    record, info = IDENTITY.record("10.0.0.5:9000", state), IDENTITY.to_proto()
    for text in (repr(IDENTITY), repr(record), str(info)):
        assert "very secret" not in text
    assert b"very secret" not in info.SerializeToString()
    assert (record.worker_id, record.role, record.address) == ("w", "prefill", "10.0.0.5:9000")
    assert (record.epoch, record.fingerprint, record.is_draining) == ("epoch", IDENTITY.fingerprint, True)


def test_a_router_learns_all_that_it_needs() -> None:
    info = IDENTITY.to_proto()
    assert (info.worker_id, info.epoch, info.model) == ("w", "epoch", "tiny")
    assert (info.max_model_len, info.vocab_size, info.num_blocks) == (64, 320, 100)
    assert list(info.eos_token_ids) == [1, 5]
    assert layout_from_proto(info.layout) == LAYOUT
    assert info.cache_descriptor == LAYOUT.descriptor()
