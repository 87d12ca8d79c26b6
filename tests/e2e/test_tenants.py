"""Two tenants on one stack whose every connection is encrypted: neither gets a block of the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
import trustme

from quire.client import AsyncClient, GenerationOptions, Tls, Unavailable
from quire.client.admin import AdminClient
from quire.protos import worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.rpc.proof import Peer
from quire.rpc.tls import CLUSTER_NAME, TlsFiles, cluster_connect
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys
from tests.testing.certificates import write_certificate
from tests.testing.decodes import decoding, make_sequence, prefill, pull_source
from tests.testing.rpc_errors import error_of
from tests.testing.stacks import StartStack, make_prompt

SECRET = "the secret of this cluster"
LENGTH = 400
NUM_FULL = (LENGTH - 1) // 16
HIT = LENGTH - 1
"""Cached tokens of a prompt that was seen before: the last one is computed, for its logits."""
WAIT_SECONDS = 20.0


@dataclass(frozen=True)
class Secured:
    """A running stack, and what one needs to reach it."""

    stack: RunningStack
    ca: Path
    keys: dict[str, str]
    files: TlsFiles
    """Of the cluster."""
    index: redis.Redis

    @asynccontextmanager
    async def client(self, tenant: str) -> AsyncIterator[AsyncClient]:
        """Connect as a tenant."""
        host, port = self.stack.address.split(":")
        assert host == "127.0.0.1"
        async with AsyncClient(
            f"localhost:{port}", api_key=self.keys[tenant], tls=Tls(ca=self.ca)
        ) as connected:
            yield connected

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Peer]:
        """Connect to a worker with a certificate and the secret of the cluster."""
        async with cluster_connect(self.files)(self.stack.ready[name].address) as channel:
            yield self.stack.peer(name, channel)

    def blocks(self) -> set[bytes]:
        """Return the hashes of all published blocks."""
        return set(self.index.scan_iter(match=b"{q}b*", count=1000))

    async def published(self, least: int) -> set[bytes]:
        """Return the published hashes once there are at least ``least``."""
        async with asyncio.timeout(WAIT_SECONDS):
            while len(found := self.blocks()) < least:
                await asyncio.sleep(0.01)
        return found


@pytest.fixture(scope="module")
def secured(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Run one prefill and one decode worker with keys, TLS outside and mutual TLS inside."""
    folder = tmp_path_factory.mktemp("secured")
    file, keys = write_keys(folder, Tenant("acme"), Tenant("globex"))
    public = write_certificate(trustme.CA(), folder, "localhost")
    cluster = write_certificate(trustme.CA(), folder, CLUSTER_NAME)
    assert public.authority is not None
    with pytest.MonkeyPatch.context() as patch, RedisProcess() as index:
        patch.setenv("QUIRE_CLUSTER_SECRET", SECRET)
        with (
            start_stack(
                "llama",
                redis_url=index.url,
                api_keys_file=file,
                tls_cert=public.certificate,
                tls_key=public.key,
                cluster_cert=cluster.certificate,
                cluster_key=cluster.key,
                cluster_ca=cluster.authority,
            ) as stack,
            redis.Redis.from_url(index.url) as reader,
        ):
            by_name = dict(zip(("acme", "globex"), keys, strict=True))
            yield Secured(stack, public.authority, by_name, cluster, reader)


async def test_the_same_prompt_of_another_tenant_finds_nothing(secured: Secured, expected: Any) -> None:
    prompt = make_prompt(LENGTH, seed=1)
    options: GenerationOptions = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    before = secured.blocks()
    async with secured.client("acme") as acme, secured.client("globex") as globex:
        first = await acme.generate(prompt, **options)
        of_acme = await secured.published(len(before) + NUM_FULL) - before
        second = await globex.generate(prompt, **options)
        of_globex = await secured.published(len(before) + 2 * len(of_acme)) - before - of_acme
        again = await acme.generate(prompt, **options)
        third = await globex.generate(prompt, **options)
    assert first.token_ids == second.token_ids == tuple(expected("llama", prompt)[:8])
    cached = [each.usage.cached_prompt_tokens for each in (first, second, again, third)]
    assert cached == [0, 0, HIT, HIT]
    assert first.usage.blocks_shipped == second.usage.blocks_shipped == NUM_FULL + 1
    assert second.usage.blocks_reused_on_decode == 0
    assert len(of_globex) == len(of_acme)


async def test_blocks_are_pulled_only_within_a_tenant(secured: Secured) -> None:
    prompt = make_prompt(LENGTH, seed=3)
    acme, globex, salted = (
        worker_pb2.CacheScope(tenant="acme"),
        worker_pb2.CacheScope(tenant="globex"),
        worker_pb2.CacheScope(salt="acme"),
    )
    async with secured.worker("prefill-0") as p, secured.worker("decode-0") as d:
        holder, taker = WorkerServiceStub(p), WorkerServiceStub(d)
        await prefill(holder, make_sequence(prompt, cache_scope=acme))
        source = await pull_source(holder, NUM_FULL)
        for scope, num_pulled in ((globex, 0), (salted, 0), (acme, NUM_FULL)):
            sequence = make_sequence(prompt, max_tokens=1, cache_scope=scope)
            request = worker_pb2.DecodeRequest(sequence=sequence, pull_from=source)
            async with decoding(taker, request) as decode:
                await decode.outputs()
            assert decode.accepted.accepted.pulled.num_blocks == num_pulled
            assert decode.accepted.accepted.num_cached_tokens == 16 * num_pulled


async def test_no_client_connects_without_a_certificate_or_in_clear(secured: Secured) -> None:
    for name in ("prefill-0", "decode-0"):
        async with grpc.aio.insecure_channel(secured.stack.ready[name].address) as channel:
            caught = await error_of(WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest()))
            assert caught.code() is grpc.StatusCode.UNAVAILABLE
    async with AsyncClient(secured.stack.address, api_key=secured.keys["acme"], timeout=5) as plain:
        with pytest.raises(Unavailable):
            await plain.model_info()


async def test_an_operator_drains_a_worker_and_clears_caches(secured: Secured) -> None:
    prompt = make_prompt(LENGTH, seed=5)

    async def state(admin: AdminClient, worker_id: str) -> Any:
        return next(w for w in await asyncio.to_thread(admin.workers) if w.worker_id == worker_id)

    with AdminClient(secured.stack.admin_address) as admin:
        async with secured.client("acme") as acme:
            await acme.generate(prompt, max_tokens=1)
            await asyncio.to_thread(admin.drain, "prefill-0")
            async with asyncio.timeout(WAIT_SECONDS):
                while not (await state(admin, "prefill-0")).is_draining:
                    await asyncio.sleep(0.01)
            drained = await acme.generate(make_prompt(LENGTH, seed=6), max_tokens=1)
            assert (drained.usage.blocks_shipped, drained.usage.blocks_pulled) == (0, 0)
            await asyncio.to_thread(admin.drain, "prefill-0", undo=True)
            async with asyncio.timeout(WAIT_SECONDS):
                while (await state(admin, "prefill-0")).is_draining:
                    await asyncio.sleep(0.01)
            assert (await acme.generate(prompt, max_tokens=1)).usage.cached_prompt_tokens == HIT
            # The answer is here before the workers have given its blocks back.
            async with asyncio.timeout(WAIT_SECONDS):
                while any(w.load.used_blocks for w in await asyncio.to_thread(admin.workers) if w.load):
                    await asyncio.sleep(0.01)
            cleared = await asyncio.to_thread(admin.clear_caches)
            assert min(cleared.values()) >= NUM_FULL
            assert (await state(admin, "prefill-0")).load.cached_blocks == 0
            assert (await acme.generate(prompt, max_tokens=1)).usage.cached_prompt_tokens == 0
            assert await asyncio.to_thread(admin.change_log_level, "error") == ["decode-0", "prefill-0"]
