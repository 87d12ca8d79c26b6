"""Asks a Redis for its version, which shows whether it can be reached."""

from __future__ import annotations

from typing import Any

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.retry import Retry

OLDEST_REDIS = (6, 2)


def redis_version(url: str, seconds: float) -> str:
    """Return the version of the Redis at a URL in the form that ``redis_index.reader_client`` takes.

    Args:
        seconds: time to connect, and then time for the answer.

    Raises:
        RedisError, RedisClusterException, OSError: it does not answer, or refuses the user.
        ValueError: the URL is malformed.
    """
    kind: Any = RedisCluster if "+cluster://" in url else Redis
    options = {"socket_connect_timeout": seconds, "socket_timeout": seconds, "retry": Retry(NoBackoff(), 0)}
    with kind.from_url(url.replace("+cluster://", "://", 1), **options) as client:
        if isinstance(client, RedisCluster):
            client = client.get_redis_connection(client.get_default_node())
        # The users of users.acl may not call INFO; every user may call HELLO.
        answer = client.execute_command("HELLO")
        fields = answer if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))
        return str(next(value.decode() for key, value in fields.items() if key == b"version"))
