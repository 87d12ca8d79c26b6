"""The prefix index in Redis, 6.2 or newer.

Keys, all in one hash slot::

    {q}b<hash>    HASH  slot of each holder -> its epoch
    {q}l<slot>    HASH  e = epoch, r = worker record; expires with the lease
    {q}slots      HASH  worker id -> slot

The names are short to save memory: there are up to a million keys. 20 bytes fit into an allocation of 24, and
one more byte would need 32 or 40.

An entry is valid while its epoch equals the epoch of the holder's lease, so all entries of a dead worker
become invalid with its lease. The scripts get prefixes as keys and build the other keys from them. Redis
expects all keys to be declared, but because of the common hash tag this works in a cluster too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import redis
import redis.retry
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, ReadOnlyError, ResponseError

from quire.kvindex.index import Holding, IndexFullError, LeaseLostError
from quire.kvindex.worker_record import WorkerRecord, read_records

OLDEST_REDIS = (6, 2)
BLOCKS, LEASES, SLOTS = "{q}b", "{q}l", "{q}slots"

LOOK_UP_BLOCKS = 4096
"""Most blocks in one look-up call: 64 KiB of arguments. Longer prompts take more calls."""

MAX_HOLDERS = 64
"""Most holders that one look-up checks. This bounds its time in Redis.

If there are more holders, it may miss the one with the most blocks.
"""

PUBLISH_BLOCKS = 512
"""Most blocks in one publish or evict call: about a millisecond of Redis time."""

SWEEP_KEYS = 200
"""Number of keys that one sweep visits: half a millisecond of Redis time. All workers share this work."""

EPOCH_BYTES = 4

_LAST_CURSOR = 2**64 - 1


Client = Redis | RedisCluster


def reader_client(url: str) -> Client:
    """Return a client for look-ups, with a short time limit and no retries.

    The URL has redis-py's form; ``rediss://`` means TLS. With ``+cluster`` before ``://``, it names any node
    of a cluster.
    """
    return _client(url, timeout=0.05)


def membership_client(url: str) -> Client:
    """Return a client for reading the members. It may be slow, since no request waits for the answer."""
    return _client(url, timeout=0.5)


def publisher_client(url: str) -> Client:
    """Return a client for publishing, with a longer time limit."""
    return _client(url, timeout=2.0)


def _client(url: str, timeout: float) -> Client:
    # By default redis-py retries ten times with back-off, so a failing Redis would delay every request.
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
    # register_script sends only the script's hash, and its text only if Redis does not have it.
    return client.register_script(files("quire.kvindex").joinpath("scripts", f"{name}.lua").read_text())


@contextmanager
def _malformed_answers() -> Iterator[None]:
    """Convert errors in parsing an answer to ``InvalidResponse``, which is one of ``UNREACHABLE``.

    redis-py does not convert them: a damaged length raises ValueError, and a damaged map AttributeError.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise InvalidResponse(f"malformed answer: {type(error).__name__}: {error}") from error


class RedisIndex:
    """Looks prefixes up in Redis; raises one of ``UNREACHABLE`` if Redis does not answer."""

    def __init__(self, client: Client) -> None:
        self._look_up = _script(client, "look_up")
        self._members = _script(client, "members")

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that has the first block, with its number of leading blocks."""
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
        with _malformed_answers():
            answer = await self._look_up(keys=[BLOCKS, LEASES], args=[b"".join(block_hashes), MAX_HOLDERS])
            # Without a readable record, the depth is of no use.
            return [
                Holding(record, max(0, min(int(depth), len(block_hashes))))
                for stored, depth in zip(answer[::2], answer[1::2], strict=True)
                for record in read_records([stored])
            ]

    async def members(self) -> list[WorkerRecord]:
        """Return the records of all live leases, in one round trip."""
        with _malformed_answers():
            return read_records(await self._members(keys=[SLOTS, LEASES]))


class WorkerLease:
    """One worker's lease in Redis; raises one of ``UNREACHABLE`` if Redis does not answer."""

    def __init__(self, client: Client, ttl_seconds: float) -> None:
        self._client = client
        self._ttl_ms = round(ttl_seconds * 1000)
        names = ("join", "beat", "publish", "evict", "sweep", "leave")
        self._scripts = {name: _script(client, name) for name in names}
        self._slot = b""
        self._epoch = b""
        self._sweep_cursor = b"0"

    async def join(self, record: WorkerRecord) -> None:
        """Begin a lease with a new epoch, which invalidates everything that was published before."""
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        args = [record.worker_id, self._epoch, record.to_json(), self._ttl_ms]
        try:
            with _malformed_answers():
                self._slot = str(int(await self._scripts["join"](keys=[SLOTS, LEASES], args=args))).encode()
        except ResponseError as error:
            # After a failover the former master keeps its connections, while new ones reach the present one.
            # A cluster redirects its clients. Redis 6 wraps errors in a script.
            is_replica = isinstance(error, ReadOnlyError) or "READONLY" in str(error)
            if is_replica and isinstance(self._client, Redis):
                await self._client.connection_pool.disconnect()
            raise

    async def beat(self) -> None:
        """Renew the lease.

        Raises:
            LeaseLostError: there is no lease to renew.
        """
        with _malformed_answers():
            is_held = await self._scripts["beat"](keys=[self._lease_key], args=[self._epoch, self._ttl_ms])
        if not is_held:
            raise LeaseLostError

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Add blocks, parents before children.

        Raises:
            LeaseLostError: the lease is gone.
            IndexFullError: Redis is at its ``maxmemory``; some of the first blocks may have been added.
        """
        for batch in _batches(block_hashes):
            if await self._publish(batch) == -1:
                raise LeaseLostError

    async def _publish(self, batch: Sequence[bytes]) -> int:
        keys, args = [self._lease_key, BLOCKS], [self._slot, self._epoch, b"".join(batch)]
        try:
            with _malformed_answers():
                return int(await self._scripts["publish"](keys=keys, args=args))
        except ResponseError as error:
            # Redis 6 wraps errors in a script, so the exception's type does not reveal that memory is full.
            if "OOM" in str(error):
                raise IndexFullError(str(error)) from error
            raise

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks of this lease, children before parents."""
        for batch in _batches(block_hashes):
            args = [self._slot, self._epoch, b"".join(batch)]
            with _malformed_answers():
                await self._scripts["evict"](keys=[BLOCKS], args=args)

    async def sweep(self) -> int:
        """Visit the next entries of all workers and remove invalid ones; return how many were removed."""
        keys, args = [SLOTS, LEASES, BLOCKS], [self._sweep_cursor, SWEEP_KEYS]
        with _malformed_answers():
            cursor, num_removed = await self._scripts["sweep"](keys=keys, args=args)
            # Redis would refuse a damaged cursor each time, and the next leases go on with it.
            if not 0 <= int(cursor) <= _LAST_CURSOR:
                raise ValueError(f"cursor {cursor!r}")
            self._sweep_cursor = str(int(cursor)).encode()
            return int(num_removed)

    async def leave(self) -> None:
        """End the lease and thus invalidate its entries, unless another process has taken over the lease."""
        with _malformed_answers():
            await self._scripts["leave"](keys=[self._lease_key], args=[self._epoch])

    @property
    def _lease_key(self) -> bytes:
        return LEASES.encode() + self._slot


def _batches(block_hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [block_hashes[i : i + PUBLISH_BLOCKS] for i in range(0, len(block_hashes), PUBLISH_BLOCKS)]


def redis_version(url: str, seconds: float) -> str:
    """Return the version of the Redis at a URL in the form that ``reader_client`` takes.

    Args:
        seconds: time to connect, and then time for the answer.

    Raises:
        RedisError, RedisClusterException, OSError: it does not answer, or refuses the user.
        ValueError: the URL is malformed.
    """
    kind: Any = redis.RedisCluster if "+cluster://" in url else redis.Redis
    options = {
        "socket_connect_timeout": seconds,
        "socket_timeout": seconds,
        "retry": redis.retry.Retry(NoBackoff(), 0),
    }
    with kind.from_url(url.replace("+cluster://", "://", 1), **options) as client:
        if isinstance(client, redis.RedisCluster):
            client = client.get_redis_connection(client.get_default_node())
        # The users of users.acl may not call INFO; every user may call HELLO.
        answer = client.execute_command("HELLO")
        fields = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
        return str(next(value.decode() for key, value in fields.items() if key == b"version"))
