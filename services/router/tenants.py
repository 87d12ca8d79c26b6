"""Who a request belongs to, and how it is told: API keys in a file, or nobody asks."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.services.errors import BadFileError, Unauthenticated
from quire.services.log import get_logger

KEY_PREFIX = "quire-"
KEY_BYTES = 32
NAME_RULE = "has from 1 to 64 letters, digits, '_', '-' and '.'"
RELOAD_SECONDS = 1.0

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_log = get_logger("tenants")

Headers = Iterable[tuple[str, str | bytes]]
"""A call's metadata, or an HTTP request's headers; names in any case."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody whose requests share KV blocks with each other, and with nobody else's.

    Attributes:
        name: empty is everybody, where no keys are asked for.
        tokens_per_minute: of prompts and answers; a minute's worth may come at once. None: no limit.
        max_requests: that may run at once. None: no limit.
        max_waiting: that may wait, first come first served, for one of those to end.
    """

    name: str = ""
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_waiting: int = 0

    def limits(self) -> str:
        """Return the limits as a key file has them."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return " ".join(f"{name.replace('_', '-')}={value}" for name, value in options.items() if value)


class Authenticator(Protocol):
    """Tells whose a request is; the same object serves gRPC and HTTP."""

    def authenticate(self, headers: Headers) -> Tenant:
        """Return the tenant whom the headers prove.

        Raises:
            Unauthenticated: they prove none.
        """
        ...


class NoKeys:
    """Asks for no key: everybody is one tenant."""

    def authenticate(self, headers: Headers) -> Tenant:
        """Return the tenant that everybody is."""
        return Tenant()


class ApiKeys:
    """The keys of a file, one in a line: ``sha256:<hash of the key> <tenant> [limit=number ...]``.

    Limits are ``tokens-per-minute``, ``max-requests`` and ``max-waiting``. They are the tenant's, and stand
    in any one of its lines. A tenant may have many keys: a new one can be in use before the old is gone.
    ``#`` begins a comment.

    Keys are 32 random bytes, so a fast hash hides them: there is nothing to guess.

    Raises:
        BadFileError: the file cannot be read, or a line is malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = _version(path)
        self._tenants = read_keys(path)

    def authenticate(self, headers: Headers) -> Tenant:
        """Return the tenant of the bearer's key; see ``Authenticator``."""
        digest = hashlib.sha256(_bearer_token(headers).encode()).digest()
        found: Tenant | None = None
        # All are compared, each in constant time: how long it takes tells nothing about any.
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthenticated("the API key is not known here", reason="UNKNOWN_API_KEY")
        return found

    async def follow(self) -> None:
        """Read the file again whenever it changes, for ever; while it is malformed the old keys hold."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Read the file again if it changed."""
        try:
            version = _version(self._path)
            if version == self._version:
                return
            self._version = version
            self._tenants = read_keys(self._path)
        except BadFileError as error:
            _log.error("api_keys_not_reloaded", error=error)
        else:
            _log.info("api_keys_reloaded", keys=len(self._tenants))


class NewKey(NamedTuple):
    """A key, which is shown once, and the line that makes it known."""

    key: str
    line: str


def new_key(tenant: Tenant) -> NewKey:
    """Make a key.

    Raises:
        ValueError: the tenant's name cannot stand in a key file.
    """
    if not _NAME.fullmatch(tenant.name):
        raise ValueError(f"a tenant's name {NAME_RULE}; got {tenant.name!r}")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return NewKey(key, f"sha256:{digest} {tenant.name} {tenant.limits()}".rstrip())


def read_keys(path: Path) -> dict[bytes, Tenant]:
    """Return the tenant of each key's hash.

    Raises:
        BadFileError: the file cannot be read, or a line is malformed.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"API keys: {path} cannot be read: {error}") from error
    owners: dict[bytes, str] = {}
    tenants: dict[str, Tenant] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            digest, tenant = _parse(words)
            if digest in owners:
                raise ValueError("this key stands in an earlier line already")
            known = tenants.get(tenant.name, tenant)
            if tenant.limits() and known.limits() and known != tenant:
                raise ValueError(f"an earlier line has other limits for {tenant.name}")
        except ValueError as error:
            raise BadFileError(f"API keys: {path}, line {number}: {error}") from error
        owners[digest] = tenant.name
        tenants[tenant.name] = tenant if tenant.limits() else known
    return {digest: tenants[name] for digest, name in owners.items()}


def _parse(words: list[str]) -> tuple[bytes, Tenant]:
    hashed, *rest = words
    match = _DIGEST.fullmatch(hashed)
    if match is None or not rest:
        # The word may be a key that somebody wrote here in clear: it is not repeated.
        raise ValueError("must be sha256:<64 hexadecimal digits> <tenant>; `quire keys new` makes such lines")
    name, *options = rest
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tenant's name {NAME_RULE}; got {name!r}")
    known = {f.name.replace("_", "-"): f.name for f in fields(Tenant) if f.name != "name"}
    limits = {}
    for option in options:
        limit, _, value = option.partition("=")
        if limit not in known or not value.isascii() or not value.isdecimal() or not int(value):
            raise ValueError(f"{option!r} is none of {', '.join(f'{k}=N' for k in known)}, N above 0")
        limits[known[limit]] = int(value)
    return bytes.fromhex(match[1]), Tenant(name, **limits)


def _bearer_token(headers: Headers) -> str:
    values = [value for name, value in headers if name.lower() == "authorization"]
    if not values:
        raise Unauthenticated("an API key is needed: send authorization: Bearer <key>", reason="NO_API_KEY")
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not token:
        raise Unauthenticated(
            "send one authorization header of the form Bearer <key>", reason="MALFORMED_AUTHORIZATION"
        )
    return token.strip()


def _version(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise BadFileError(f"API keys: {path} cannot be read: {error}") from error
    return status.st_mtime_ns, status.st_size, status.st_ino
