"""What a router knows of workers and blocks: from Redis, without it, and while it does not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex import guarded_index
from quire.kvindex.block_hash import CacheScope, block_hashes, fingerprint, root_hash
from quire.kvindex.redis_index import WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.services.local.redis_process import RedisProcess
from quire.services.requests.served_model import ServedModel
from quire.services.router.sources import open_sources
from quire.services.router.workers.membership import Member, MembershipLost

SECRET = b"secret"
SCOPE = CacheScope("tenant", "salt")
PROMPT = list(range(20))
DESCRIPTOR = b"tiny"


@pytest.fixture
def closed_url() -> Iterator[str]:
    """Return the address of a port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}"


def hashes(model: ServedModel) -> list[bytes]:
    root = root_hash(DESCRIPTOR, SECRET, SCOPE)
    return list(block_hashes(root, PROMPT, model.block_size))


async def test_without_redis_the_workers_are_those_that_were_named(model: ServedModel) -> None:
    async with open_sources(None, ["a:1", "b:2"], SECRET, CollectorRegistry()) as sources:
        assert [member.address for member in await sources.membership.members()] == ["a:1", "b:2"]
        known = await sources.prefixes(model.block_size).look_up(PROMPT, SCOPE, [DESCRIPTOR])
    assert (list(known.block_hashes), known.cached_by_worker) == (hashes(model), None)
    assert sources.expected_fingerprint(b"model") == fingerprint(b"model", SECRET)


async def test_redis_has_the_members_and_their_blocks(
    model: ServedModel, redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_index, "BUDGET_SECONDS", 10.0)
    client = publisher_client(redis.worker_url)
    lease = WorkerLease(client, 30.0)
    await lease.join(WorkerRecord("w", "prefill", "w:1", "epoch", "print", is_draining=True))
    await lease.publish(hashes(model)[:4])
    registry = CollectorRegistry()
    async with open_sources(redis.router_url, [], SECRET, registry) as sources:
        assert await sources.membership.members() == [Member("w:1", "epoch", True, "print", "prefill")]
        known = await sources.prefixes(model.block_size).look_up(PROMPT, SCOPE, [DESCRIPTOR])
        assert known.cached_by_worker == {"w": 4 * model.block_size}
        other = await sources.prefixes(model.block_size).look_up(
            PROMPT, CacheScope("other", "salt"), [DESCRIPTOR]
        )
        assert other.cached_by_worker == {}
    await client.aclose()
    assert registry.get_sample_value("quire_index_lookup_seconds_count", {"result": "hit"}) == 1


async def test_an_error_about_redis_names_the_feature_that_needs_it(
    model: ServedModel, closed_url: str
) -> None:
    registry = CollectorRegistry()
    async with open_sources(closed_url, [], SECRET, registry) as sources:
        with pytest.raises(MembershipLost):
            await sources.membership.members()
        known = await sources.prefixes(model.block_size).look_up(PROMPT, SCOPE, [DESCRIPTOR])
    assert (list(known.block_hashes), known.cached_by_worker) == (hashes(model), None)
    reasons = ("error", "timeout")
    counts = [
        registry.get_sample_value("quire_index_fallback_total", {"reason": each}) or 0 for each in reasons
    ]
    assert sum(counts) == 1
