"""The prefix index in Redis, 6.2 or newer.

Keys, all in one hash slot::

    {q}b<hash>    HASH  slot of each holder -> its epoch
    {q}l<slot>    HASH  e = epoch, r = worker record; expires with the lease
    {q}slots      HASH  worker id -> slot

Their names are short since 20 bytes fit an allocation of 24, where one more takes 32 or 40, a million times.

An entry counts while its epoch is that of the holder's lease, so a dead worker's entries vanish with its
lease, whatever their number. The scripts build keys from the prefixes that they are given as keys. Redis
wants every key declared; the common hash tag keeps this right in a cluster too.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from quire.kvindex.index import Holding, IndexFullError, LeaseLostError
from quire.kvindex.membership import WorkerRecord, read_records

BLOCKS, LEASES, SLOTS = "{q}b", "{q}l", "{q}slots"

LOOK_UP_BLOCKS = 4096
"""Most blocks of one call: 64 KiB of argument. Longer prompts take more calls."""

MAX_HOLDERS = 64
"""Most holders of one look-up, which bounds its time in Redis. Among more, the deepest may be missed."""

PUBLISH_BLOCKS = 512
"""Most blocks of one call: about a millisecond of Redis."""

SWEEP_KEYS = 200
"""Keys that one sweep visits: half a millisecond of Redis. Every worker sweeps, so more sweep faster."""

EPOCH_BYTES = 4


Client = Redis | RedisCluster


def reader_client(url: str) -> Client:
    """Return a client for look-ups: in time or not at all, no retry.

    The URL is one of redis-py's, with TLS as ``rediss://``. With ``+cluster`` before the ``://`` it names any
    node of a cluster.
    """
    return _client(url, timeout=0.05)


def publisher_client(url: str) -> Client:
    """Return a client for publishing, which may take longer."""
    return _client(url, timeout=2.0)


def _client(url: str, timeout: float) -> Client:
    # redis-py's defaults retry ten times with back-off: a sick Redis would hold up every request.
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": max(timeout, 0.25),
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 15,
    }
    if "+cluster://" in url:
        return RedisCluster.from_url(url.replace("+cluster://", "://", 1), **options)
    return Redis.from_url(url, **options)


def _script(client: Client, name: str) -> Any:
    # register_script sends the hash alone and reloads the text when Redis has lost it.
    return client.register_script(files("quire.kvindex").joinpath("scripts", f"{name}.lua").read_text())


class RedisIndex:
    """The reading side. Raises one of ``UNREACHABLE`` where Redis does not answer."""

    def __init__(self, client: Client) -> None:
        self._look_up = _script(client, "look_up")
        self._members = _script(client, "members")

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that holds the first block, and how far its blocks go."""
        found: dict[str, Holding] = {}
        for start in range(0, len(block_hashes), LOOK_UP_BLOCKS):
            for worker, depth in await self._look_up_part(block_hashes[start : start + LOOK_UP_BLOCKS]):
                before = found[worker.worker_id].num_blocks if worker.worker_id in found else 0
                if before == start:
                    found[worker.worker_id] = Holding(worker, before + depth)
            if all(holding.num_blocks < start + LOOK_UP_BLOCKS for holding in found.values()):
                break
        return list(found.values())

    async def _look_up_part(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        answer = await self._look_up(keys=[BLOCKS, LEASES], args=[b"".join(block_hashes), MAX_HOLDERS])
        # A record that cannot be read takes its depth with it.
        return [
            Holding(record, depth)
            for stored, depth in zip(answer[::2], answer[1::2], strict=True)
            for record in read_records([stored])
        ]

    async def members(self) -> list[WorkerRecord]:
        """Return the records of all live leases, in one round trip."""
        return read_records(await self._members(keys=[SLOTS, LEASES]))


class WorkerLease:
    """The writing side. Raises one of ``UNREACHABLE`` where Redis does not answer."""

    def __init__(self, client: Client, ttl_seconds: float) -> None:
        self._ttl_ms = round(ttl_seconds * 1000)
        names = ("join", "beat", "publish", "evict", "sweep", "leave")
        self._scripts = {name: _script(client, name) for name in names}
        self._slot = b""
        self._epoch = b""
        self._sweep_cursor = b"0"

    async def join(self, record: WorkerRecord) -> None:
        """Begin a lease with a new epoch; nothing that was published before counts any more."""
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        args = [record.worker_id, self._epoch, record.to_json(), self._ttl_ms]
        slot = await self._scripts["join"](keys=[SLOTS, LEASES], args=args)
        self._slot = str(slot).encode()

    async def beat(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: there is none to renew.
        """
        if not await self._scripts["beat"](keys=[self._lease_key], args=[self._epoch, self._ttl_ms]):
            raise LeaseLostError

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Add blocks, parents before children.

        Raises:
            LeaseLostError: the lease is gone.
            IndexFullError: Redis is at its ``maxmemory``; some of the first may have been added.
        """
        for batch in _batches(block_hashes):
            if await self._publish(batch) == -1:
                raise LeaseLostError

    async def _publish(self, batch: Sequence[bytes]) -> int:
        keys, args = [self._lease_key, BLOCKS], [self._slot, self._epoch, b"".join(batch)]
        try:
            return int(await self._scripts["publish"](keys=keys, args=args))
        except ResponseError as error:
            # Redis 6 wraps what went wrong within a script, so the type does not tell.
            if "OOM" in str(error):
                raise IndexFullError(str(error)) from error
            raise

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks of this lease, children before parents."""
        for batch in _batches(block_hashes):
            args = [self._slot, self._epoch, b"".join(batch)]
            await self._scripts["evict"](keys=[BLOCKS], args=args)

    async def sweep(self) -> int:
        """Visit the next entries and remove those that count no more, whosever they are; return how many."""
        keys, args = (
            [SLOTS, LEASES, BLOCKS],
            [self._sweep_cursor, SWEEP_KEYS],
        )
        self._sweep_cursor, num_removed = await self._scripts["sweep"](keys=keys, args=args)
        return int(num_removed)

    async def leave(self) -> None:
        """End the lease, unless it is already another's: its entries stop to count at once."""
        await self._scripts["leave"](keys=[self._lease_key], args=[self._epoch])

    @property
    def _lease_key(self) -> bytes:
        return LEASES.encode() + self._slot


def _batches(block_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [block_hashes[i : i + PUBLISH_BLOCKS] for i in range(0, len(block_hashes), PUBLISH_BLOCKS)]
