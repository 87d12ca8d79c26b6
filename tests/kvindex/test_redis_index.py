"""What only Redis does: forget scripts, run full, share a server, answer late."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from quire.kvindex.index import UNREACHABLE, IndexFullError
from quire.kvindex.redis_index import (
    LOOK_UP_BLOCKS,
    MAX_HOLDERS,
    RedisIndex,
    WorkerLease,
    publisher_client,
    reader_client,
)
from quire.services.local.redis_process import RedisProcess
from tests.testing.until import until

HASHES = [index.to_bytes(16, "little") for index in range(1, 2 * LOOK_UP_BLOCKS + 100)]


async def joined(backend: Any, record: Any, name: str) -> Any:
    lease = backend.lease()
    await lease.join(record(name))
    return lease


@pytest.mark.parametrize("beyond", [-1, 0, 1, LOOK_UP_BLOCKS, LOOK_UP_BLOCKS + 50])
async def test_long_prompts_take_more_calls(
    beyond: int, redis_backend: Any, record: Any, depths: Any
) -> None:
    a, b = await joined(redis_backend, record, "a"), await joined(redis_backend, record, "b")
    await a.publish(HASHES[: LOOK_UP_BLOCKS + beyond])
    await b.publish(HASHES[:7])
    assert await depths(redis_backend.index, HASHES) == {"a": LOOK_UP_BLOCKS + beyond, "b": 7}


async def test_holders_of_one_block_are_bounded(redis_backend: Any, record: Any, depths: Any) -> None:
    for number in range(MAX_HOLDERS + 3):
        await (await joined(redis_backend, record, f"w{number}")).publish(HASHES[:2])
    assert len(await depths(redis_backend.index, HASHES)) == MAX_HOLDERS


async def test_forgotten_scripts_are_sent_again(redis_backend: Any, record: Any, depths: Any) -> None:
    lease = await joined(redis_backend, record, "a")
    for blocks in (HASHES[:1], HASHES[1:2]):
        await redis_backend.client.script_flush()
        await lease.publish(blocks)
    await redis_backend.client.script_flush()
    assert await depths(redis_backend.index, HASHES[:9]) == {"a": 2}


async def test_a_malformed_record_hides_no_other_worker(redis_backend: Any, record: Any, depths: Any) -> None:
    for name in ("a", "b"):
        await (await joined(redis_backend, record, name)).publish(HASHES[:2])
    slot = (await redis_backend.client.hget("{q}slots", "a")).decode()
    await redis_backend.client.hset(f"{{q}}l{slot}", "r", b"{nonsense")
    assert await redis_backend.index.members() == [record("b")]
    assert await depths(redis_backend.index, HASHES[:9]) == {"b": 2}


async def test_a_full_redis_takes_workers_but_no_blocks(redis_backend: Any, record: Any, depths: Any) -> None:
    lease = await joined(redis_backend, record, "a")
    await lease.publish(HASHES[:3])
    (limit,) = (await redis_backend.client.config_get("maxmemory")).values()
    await redis_backend.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(IndexFullError):
            await lease.publish(HASHES[3:5])
        await lease.beat()
        await joined(redis_backend, record, "b")
        assert len(await redis_backend.index.members()) == 2
        assert await depths(redis_backend.index, HASHES[:9]) == {"a": 3}
        await lease.evict(HASHES[2:3])
    finally:
        await redis_backend.client.config_set("maxmemory", limit)
    await lease.publish(HASHES[2:5])
    assert await depths(redis_backend.index, HASHES[:9]) == {"a": 5}


async def test_a_late_answer_is_not_taken_for_another(
    redis_process: Any, redis_backend: Any, record: Any
) -> None:
    lease = await joined(redis_backend, record, "a")
    await lease.publish(HASHES[:3])
    client = reader_client(redis_process.router_url)
    index = RedisIndex(client)
    try:
        (holding,) = await index.look_up(HASHES[:3])
        os.kill(redis_process.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                with pytest.raises((RedisError, TimeoutError)):
                    async with asyncio.timeout(0.02):
                        await index.look_up(HASHES[:3])
        finally:
            os.kill(redis_process.pid, signal.SIGCONT)
        assert holding.num_blocks == 3
        assert [each.num_blocks for each in await index.look_up(HASHES[1:3])] == [2]
        assert await index.look_up(HASHES[7:9]) == []
    finally:
        await client.aclose()


async def test_a_redis_that_is_gone_raises_soon(redis_process: Any) -> None:
    client = publisher_client("redis://127.0.0.1:1/0")
    try:
        with pytest.raises(RedisError):
            async with asyncio.timeout(5.0):
                await RedisIndex(client).look_up(HASHES[:1])
    finally:
        await client.aclose()


@asynccontextmanager
async def redis_that_answers(answer: bytes) -> AsyncIterator[str]:
    """Yield the URL of a server that answers every script with the same bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while command := await reader.read(1 << 16):
            if b"HELLO" in command:
                writer.write(b"%1\r\n$5\r\nproto\r\n:3\r\n")
            elif b"PING" in command:
                writer.write(b"+PONG\r\n")
            else:
                writer.write(answer if b"EVALSHA" in command else b"+OK\r\n" * command.count(b"CLIENT"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "answer", [b":7q\r\n", b"$-x\r\n", b"*q\r\n", b"*1\r\n:5\r\n", b"+OK\r\n", b"*2\r\n+a\r\n+b\r\n"]
)
async def test_damaged_answers_count_as_no_answer(answer: bytes, record: Any) -> None:
    async with redis_that_answers(answer) as url:
        reader, publisher = reader_client(url), publisher_client(url)
        index, lease = RedisIndex(reader), WorkerLease(publisher, 10.0)
        try:
            for call in (lease.join(record("a")), lease.sweep(), index.members(), index.look_up(HASHES[:4])):
                with suppress(*UNREACHABLE):
                    await call
        finally:
            await reader.aclose()
            await publisher.aclose()


@pytest.mark.parametrize("cursor", [b"x", b"-1", b"9" * 30])
async def test_a_damaged_cursor_is_not_sent_again(cursor: bytes) -> None:
    async with redis_that_answers(b"*2\r\n$%d\r\n%s\r\n:0\r\n" % (len(cursor), cursor)) as url:
        client = publisher_client(url)
        try:
            with pytest.raises(InvalidResponse):
                await WorkerLease(client, 10.0).sweep()
        finally:
            await client.aclose()


async def test_a_damaged_depth_promises_no_more_blocks_than_were_asked_for(record: Any) -> None:
    stored = record("a").to_json()
    answer = b"*2\r\n$%d\r\n%s\r\n:900\r\n" % (len(stored), stored)
    async with redis_that_answers(answer) as url:
        reader = reader_client(url)
        try:
            (holding,) = await RedisIndex(reader).look_up(HASHES[:4])
        finally:
            await reader.aclose()
    assert (holding.worker, holding.num_blocks) == (record("a"), 4)


async def test_a_lease_leaves_a_master_that_has_become_a_replica(record: Any) -> None:
    with RedisProcess() as process:
        client, admin = publisher_client(process.worker_url), publisher_client(process.url)

        async def has_left() -> bool:
            return all(each["user"] != "quire-worker" for each in await admin.client_list())

        try:
            lease = WorkerLease(client, 10.0)
            await lease.join(record("a"))
            assert not await has_left()
            await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            with pytest.raises(ResponseError):
                await lease.join(record("a"))
            await until(has_left)
        finally:
            await client.aclose()
            await admin.aclose()
