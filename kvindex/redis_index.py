"""The prefix index in Redis: which worker holds how much of a prompt, as a hint.

Keys, all in one hash slot::

    {quire}:b:<hash>    HASH  slot of each holder -> its epoch
    {quire}:l:<slot>    HASH  e = epoch, r = worker record; expires with the lease
    {quire}:slots       HASH  worker id -> slot

An entry counts while its epoch is that of the holder's lease, so a dead worker's entries vanish with its
lease, whatever their number.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from quire.kvindex.membership import WorkerRecord

LOOK_UP_BLOCKS = 4096
"""Most blocks of one look-up; what lies behind them is not asked for."""

PUBLISH_BLOCKS = 512
"""Most blocks of one publish: about a millisecond of Redis."""

_BLOCKS = "{quire}:b:"
_LEASES = "{quire}:l:"
_SLOTS = "{quire}:slots"


class LeaseLostError(Exception):
    """The lease expired or Redis lost it: join again and publish everything."""


class Holding(NamedTuple):
    """How many leading blocks of a prompt a worker has published."""

    worker: WorkerRecord
    num_blocks: int


def reader_client(url: str) -> Redis:
    """Return a client for look-ups: in time or not at all, no retry."""
    return _client(url, timeout=0.05)


def publisher_client(url: str) -> Redis:
    """Return a client for publishing, which may take longer."""
    return _client(url, timeout=2.0)


def _client(url: str, timeout: float) -> Redis:
    # redis-py's defaults retry ten times with back-off: a sick Redis would hold up every request.
    return Redis.from_url(
        url,
        socket_timeout=timeout,
        socket_connect_timeout=max(timeout, 0.25),
        retry=Retry(NoBackoff(), 0),
        health_check_interval=15,
    )


def _script(client: Redis, name: str) -> Any:
    # register_script sends the hash alone and reloads the text when Redis has lost it.
    return client.register_script(files("quire.kvindex").joinpath("scripts", f"{name}.lua").read_text())


class RedisIndex:
    """The reading side: look-ups and members. Raises ``RedisError`` where Redis does not answer."""

    def __init__(self, client: Redis) -> None:
        self._look_up = _script(client, "look_up")
        self._members = _script(client, "members")

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that holds the first block, and how far its blocks go."""
        packed = b"".join(block_hashes[:LOOK_UP_BLOCKS])
        answer = await self._look_up(keys=[_BLOCKS, _LEASES], args=[packed])
        return [
            Holding(WorkerRecord.from_json(record), depth)
            for record, depth in zip(answer[::2], answer[1::2], strict=True)
        ]

    async def members(self) -> list[WorkerRecord]:
        """Return the records of all live workers."""
        return [WorkerRecord.from_json(record) for record in await self._members(keys=[_SLOTS, _LEASES])]


class WorkerLease:
    """The writing side: one worker's life in the index. Raises ``RedisError`` where Redis does not answer."""

    def __init__(self, client: Redis, ttl_seconds: float) -> None:
        self._client = client
        self._ttl_ms = round(ttl_seconds * 1000)
        self._scripts = {name: _script(client, name) for name in ("join", "beat", "publish", "evict")}
        self._slot = b""
        self._epoch = b""

    async def join(self, record: WorkerRecord) -> None:
        """Begin a lease with a new epoch; nothing that was published before counts any more."""
        self._epoch = secrets.token_bytes(4)
        args = [record.worker_id, self._epoch, record.to_json(), self._ttl_ms]
        slot = await self._scripts["join"](keys=[_SLOTS, _LEASES], args=args)
        self._slot = str(slot).encode()

    async def beat(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: there is none to renew.
        """
        if not await self._scripts["beat"](keys=[self._key], args=[self._epoch, self._ttl_ms]):
            raise LeaseLostError

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Add blocks, parents before children.

        Raises:
            LeaseLostError: the lease is gone.
        """
        for batch in _batches(block_hashes):
            args = [self._slot, self._epoch, b"".join(batch)]
            if await self._scripts["publish"](keys=[self._key, _BLOCKS], args=args) == -1:
                raise LeaseLostError

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks, children before parents."""
        for batch in _batches(block_hashes):
            await self._scripts["evict"](keys=[_BLOCKS], args=[self._slot, self._epoch, b"".join(batch)])

    async def leave(self) -> None:
        """End the lease: all entries of this worker stop to count at once."""
        await self._client.delete(self._key)

    @property
    def _key(self) -> bytes:
        return _LEASES.encode() + self._slot


def _batches(block_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [block_hashes[i : i + PUBLISH_BLOCKS] for i in range(0, len(block_hashes), PUBLISH_BLOCKS)]
