"""The hand-off between two workers of a gateway: what is read of it, and what a client may send instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.errors import InvalidArgument
from quire.services.vllm_adapter.hand_off import FIELD, hand_off, has_hand_off, pull_source

SECRET = b"secret"


def request(text: str | None) -> Any:
    return vllm.GenerateRequest(kv_transfer_params_json=text)


@given(
    host=st.sampled_from(["10.0.0.5", "[::1]", "worker.example"]),
    port=st.integers(1, 65535),
    epoch=st.text(min_size=1),
    num_blocks=st.integers(0, 2**31 - 1),
    secret=st.sampled_from([b"", SECRET]),
)
def test_a_worker_reads_what_another_one_wrote(
    host: str, port: int, epoch: str, num_blocks: int, secret: bytes
) -> None:
    sent = request(hand_off(f"{host}:{port}", epoch, num_blocks, secret))
    assert has_hand_off(sent)
    source = pull_source(sent, ClusterTrust(secret, has_tls=True))
    assert source is not None
    assert (source.address, source.epoch, source.num_blocks) == (f"{host}:{port}", epoch, num_blocks)


def test_a_proof_is_of_the_address_and_the_epoch_together() -> None:
    """Otherwise a proof of one worker could be put together from those of two."""
    one, other = (json.loads(hand_off(f"10.0.0.{n}:1", f"e{n}", 4, SECRET)) for n in (1, 2))
    for member in ("remote_engine_id", "remote_host", "remote_proof"):
        mixed = one | {member: other[member]}
        with pytest.raises(InvalidArgument, match="is not proved to be a worker of this cluster"):
            pull_source(request(json.dumps(mixed)), ClusterTrust(SECRET))
    pull_source(request(json.dumps(one | {"remote_num_blocks": 5})), ClusterTrust(SECRET))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"x"', "null", "nul", "[" * 100_000, '{"a":' * 100_000])
def test_a_text_that_is_no_object_is_the_clients_mistake(text: str) -> None:
    for reading in (has_hand_off, lambda sent: pull_source(sent, ClusterTrust(SECRET))):
        with pytest.raises(InvalidArgument) as caught:
            reading(request(text))
        assert caught.value.field == FIELD


@pytest.mark.parametrize(
    "text", [None, "{}", '{"do_remote_decode": true}', '{"do_remote_prefill": false, "remote_host": 7}']
)
def test_a_request_for_one_worker_has_no_hand_off(text: str | None) -> None:
    sent = request(text)
    assert not has_hand_off(sent)
    assert pull_source(sent, ClusterTrust(SECRET)) is None
