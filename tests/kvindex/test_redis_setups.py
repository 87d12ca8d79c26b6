"""Redis as it is run in earnest: with users of little power, behind TLS, as a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trustme
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from quire.kvindex.redis_index import RedisIndex, WorkerLease, publisher_client, redis_version
from quire.rpc.tls import TlsFiles
from quire.services.local.redis_process import RedisProcess
from tests.testing.certificates import write_certificate
from tests.testing.until import until

HASHES = [index.to_bytes(16, "little") for index in range(1, 10)]
CLUSTER_SLOTS = 16384
BUS_OFFSET = 10_000

Connect = Callable[[str], Redis]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Return a function from URL to a client that is closed in the end."""
    async with AsyncExitStack() as stack:

        def to(url: str) -> Any:
            client = publisher_client(url)
            stack.push_async_callback(client.aclose)
            return client

        yield to


async def use(worker: Any, router: Any, record: Any) -> None:
    """Lead a short life in an index through all its scripts."""
    lease, index = WorkerLease(worker, 30.0), RedisIndex(router)
    await lease.join(record("a"))
    await lease.publish(HASHES)
    await lease.evict(HASHES[:7:-1])
    await lease.beat()
    await lease.sweep()
    assert [each.num_blocks for each in await index.look_up(HASHES)] == [8]
    assert await index.members() == [record("a")]
    await lease.leave()
    assert await index.members() == []


# --- users --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["router", "worker"])
@pytest.mark.parametrize(
    "command",
    [
        *("FLUSHALL", "FLUSHDB", "CONFIG GET *", "KEYS *", "ACL LIST", "SHUTDOWN", "SCRIPT FLUSH"),
        *("GET {q}x", "EVAL return(1) 0", "HGET other x", "DEBUG SLEEP 0", "CLIENT LIST", "MONITOR"),
    ],
)
async def test_no_role_has_more_commands_than_the_index_needs(
    role: str, command: str, redis_process: RedisProcess, connect: Connect
) -> None:
    client = connect(getattr(redis_process, f"{role}_url"))
    with pytest.raises(NoPermissionError):
        await client.execute_command(*command.split())


async def test_routers_neither_delete_nor_join(
    redis_process: RedisProcess, connect: Connect, record: Any
) -> None:
    client = connect(redis_process.router_url)
    for command in ("HSET other 1 2", "DEL {q}l1", "SCAN 0"):
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command.split())
    with pytest.raises(RedisError, match=r"ermission|NOPERM|can't run"):
        await WorkerLease(client, 30.0).join(record("a"))


async def test_scripts_reach_no_foreign_key(redis_process: RedisProcess, connect: Connect) -> None:
    client = connect(redis_process.worker_url)
    write = client.register_script("return redis.call('HSET', 'other', 'x', 'y')")
    with pytest.raises(RedisError, match=r"ermission|NOPERM|can't access"):
        await write(keys=["{q}slots"])


async def test_the_default_user_is_off(redis_process: RedisProcess, connect: Connect) -> None:
    for user in ("", ":wrong@", "quire-worker:wrong@"):
        with pytest.raises(AuthenticationError):
            await connect(f"redis://{user}127.0.0.1:{redis_process.port}").ping()


# --- TLS ----------------------------------------------------------------------------------------------------


@pytest.fixture
def certify(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TlsFiles]:
    """Return a function that makes a certificate for a name, each by an authority of its own."""
    return lambda name: write_certificate(trustme.CA(), tmp_path_factory.mktemp("tls"), name)


def tls(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    return context


async def test_tls_and_whom_it_trusts(
    redis_process: RedisProcess, certify: Callable[[str], TlsFiles], record: Any, forwarding: Any
) -> None:
    """The bundled Redis has no TLS: a server in front of it has. Publishers' clients wait long enough."""
    ours, other, misnamed = certify("127.0.0.1"), certify("127.0.0.1"), certify("127.0.0.2")

    def url(plain: str, port: int, files: TlsFiles) -> str:
        secure = plain.replace("redis://", "rediss://").replace(f":{redis_process.port}/", f":{port}/")
        return f"{secure}?ssl_ca_certs={files.authority}"

    async with forwarding(redis_process.port, tls=tls(ours)) as port:
        worker = publisher_client(url(redis_process.worker_url, port, ours))
        router = publisher_client(url(redis_process.router_url, port, ours))
        stranger = publisher_client(url(redis_process.router_url, port, other))
        await use(worker, router, record)
        with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
            await RedisIndex(stranger).members()
        for client in (worker, router, stranger):
            await client.aclose()
    async with forwarding(redis_process.port, tls=tls(misnamed)) as port:
        client = publisher_client(url(redis_process.router_url, port, misnamed))
        with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
            await RedisIndex(client).members()
        await client.aclose()


# --- cluster ------------------------------------------------------------------------------------------------


class ClusterNode(RedisProcess):
    """A node of a cluster; the nodes talk to each other on a port 10,000 above."""

    def __init__(self) -> None:
        while True:
            with socket.create_server(("127.0.0.1", 0)) as probe, contextlib.suppress(OSError, OverflowError):
                port = probe.getsockname()[1]
                with socket.create_server(("127.0.0.1", port + BUS_OFFSET)):
                    break
        super().__init__(port, password="common")

    def _settings(self) -> str:
        return super()._settings() + "cluster-enabled yes\n"


@pytest.fixture
def cluster() -> Iterator[list[RedisProcess]]:
    with ClusterNode() as first, ClusterNode() as second:
        yield [first, second]


@pytest.mark.slow
async def test_a_cluster_keeps_the_index_on_one_node(
    cluster: list[RedisProcess], connect: Connect, record: Any
) -> None:
    nodes = [connect(process.url) for process in cluster]
    half = CLUSTER_SLOTS // 2
    for node, slots in zip(nodes, (range(half), range(half, CLUSTER_SLOTS)), strict=True):
        await node.execute_command("CLUSTER ADDSLOTS", *slots)
    await nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", cluster[1].port)

    async def is_whole() -> bool:
        states = [await node.execute_command("CLUSTER INFO") for node in nodes]
        return all(s["cluster_known_nodes"] == "2" and s["cluster_state"] == "ok" for s in states)

    await until(is_whole)
    for process in cluster:
        worker, router = (
            connect(url.replace("redis://", "redis+cluster://"))
            for url in (process.worker_url, process.router_url)
        )
        await use(worker, router, record)
        url = process.router_url.replace("redis://", "redis+cluster://")
        assert (await asyncio.to_thread(redis_version, url, 5.0)).startswith("6.2.")
    sizes = [await node.dbsize() for node in nodes]
    assert sorted(map(bool, sizes)) == [False, True]
