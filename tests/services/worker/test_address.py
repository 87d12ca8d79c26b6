"""The address that a worker announces when it listens on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.rpc.tls import TlsFiles
from quire.services.worker.config import WorkerConfig
from quire.services.worker.lifecycle.address import address_towards


@pytest.mark.parametrize(
    "url",
    [
        "redis://quire-worker:secret@127.0.0.1:6379/0",
        "rediss://127.0.0.1",
        "redis+cluster://user:password@127.0.0.1:7000",
    ],
)
def test_it_is_the_one_that_leads_to_redis(url: str) -> None:
    assert address_towards(url, 9000) == "127.0.0.1:9000"


def test_where_no_way_leads_to_redis_the_remedy_is_named() -> None:
    with pytest.raises(OSError, match=r"no-such-host\.invalid .* --advertise host:port"):
        address_towards("redis://no-such-host.invalid:6379/0", 9000)


def test_without_redis_the_address_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"0\.0\.0\.0: give --advertise"):
        WorkerConfig(role="decode", host="0.0.0.0", cluster_secret=b"s")
    config = WorkerConfig(role="decode", host="0.0.0.0", cluster_secret=b"s", advertise="10.0.0.5:9000")
    assert config.advertise == "10.0.0.5:9000"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "[::]", "worker.example"])
def test_a_worker_that_strangers_reach_needs_a_secret_or_certificates(host: str) -> None:
    with pytest.raises(ValueError, match=r"QUIRE_CLUSTER_SECRET.*--cluster-cert.*--host on the loopback"):
        WorkerConfig(role="decode", host=host, advertise="10.0.0.5:9000")
    cert, key, ca = Path("cert"), Path("key"), Path("ca")
    config = WorkerConfig(
        role="decode", host=host, advertise="10.0.0.5:9000", cluster_cert=cert, cluster_key=key, cluster_ca=ca
    )
    assert config.cluster_tls == TlsFiles(cert, key, ca)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_on_the_loopback_it_needs_none(host: str) -> None:
    assert WorkerConfig(role="decode", host=host).cluster_secret == b""
