"""The address that a worker announces when it listens on all of them."""

from __future__ import annotations

import pytest

from quire.services.worker.address import address_towards
from quire.services.worker.app import WorkerConfig


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
        WorkerConfig(role="decode", host="0.0.0.0")
    assert WorkerConfig(role="decode", host="0.0.0.0", advertise="10.0.0.5:9000").advertise == "10.0.0.5:9000"
