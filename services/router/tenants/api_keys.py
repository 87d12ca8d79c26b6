"""Defines tenants, and determines that of a request by API keys from a file; without a file, there is one."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

from quire.fairness.patience import MAX_PRIORITY
from quire.rpc.errors import (
    BadFileError,
    InvalidArgument,
    NotFound,
    ServiceError,
    Unauthenticated,
    quoted,
)
from quire.rpc.interceptors import OwnCalls, refusal
from quire.rpc.renewal import Renewal

KEY_PREFIX = "quire-"
KEY_BYTES = 32
NAME_RULE = "has from 1 to 64 letters, digits, '_', '-' and '.'"
RELOAD_SECONDS = 1.0
_HEADER = "authorization: Bearer <key>, or x-api-key: <key>"

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

Headers = Iterable[tuple[str, str | bytes]]
"""Metadata of a gRPC call or headers of an HTTP request; names may be in upper or lower case."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client whose requests share KV blocks with each other, and never with those of other tenants.

    Attributes:
        name: name of the tenant; empty for the single tenant of a router without API keys.
        tokens_per_minute: limit on prompt and answer tokens; one minute's worth may come at once. None: no
            limit.
        max_requests: limit on requests that run at the same time; a request counts once for each of its
            answers. None: no limit.
        max_waiting: limit on requests that wait, in order of arrival, for a running one to end.
        weight: its part of the computed tokens while tenants compete, in relation to the others' weights.
            None: 1.
        priority: its requests may have priorities down to the negative of this.
        models: names of the model and of adapters that the tenant may use; empty: all.
    """

    name: str = ""
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    max_waiting: int = 0
    weight: int | None = None
    priority: int = 0
    models: tuple[str, ...] = ()

    def check_priority(self, priority: int) -> None:
        """Refuse a priority that is out of range, or more urgent than the tenant's key allows.

        Raises:
            InvalidArgument: the priority is refused.
        """
        least = -self.priority if self.name else -MAX_PRIORITY
        if not least <= priority <= MAX_PRIORITY:
            raise InvalidArgument("priority", f"must be from {least} to {MAX_PRIORITY} here; got {priority}")

    def may_use(self, model: str) -> bool:
        """Return whether it may use the model or adapter of a name."""
        return not self.models or model in self.models

    def check_may_use(self, model: str) -> None:
        """Raise NotFound unless it may use the model or adapter of a name."""
        if not self.may_use(model):
            raise NotFound(f"model {quoted(model)} is not served to this API key", reason="MODEL_NOT_FOUND")

    def limits(self) -> str:
        """Return the limits in the syntax of a key file, ``name=value`` pairs; empty without limits."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        options["models"] = ",".join(self.models)
        return " ".join(f"{name.replace('_', '-')}={value}" for name, value in options.items() if value)


CALLER: ContextVar[Tenant] = ContextVar("caller")
"""Tenant of the current call."""


class Authenticator(Protocol):
    """Determines the tenant of a request; the same object serves gRPC and HTTP."""

    def authenticate(self, headers: Headers) -> Tenant:
        """Return the tenant to whom the credentials in the headers belong.

        Raises:
            Unauthenticated: the headers carry no valid credentials.
        """


class NoKeys:
    """Accepts requests without a key; all clients are one tenant."""

    def authenticate(self, headers: Headers) -> Tenant:
        """Return the tenant that all clients share, which has no name and no limits."""
        return Tenant()


class ApiKeys:
    """Authenticates requests by the API keys in a file.

    A line of the file is ``sha256:<hash of the key> <tenant> [limit=number ...] [models=name,...]``.
    The limits are ``tokens-per-minute``, ``max-requests``, ``max-waiting``, ``weight`` and ``priority``. They
    apply to the tenant, not to the key, and may be given in any one of its lines. A tenant may have several
    keys, so that a new key can be in use before the old one is removed. ``#`` begins a comment.

    Keys are 32 random bytes. A fast hash is enough to protect them, because they cannot be guessed.

    Raises:
        BadFileError: the file cannot be read, or a line is malformed.
    """

    def __init__(self, path: Path) -> None:
        self._renewal = Renewal([path], lambda: read_keys(path), "api_keys")
        self._tenants = self._renewal.first

    def authenticate(self, headers: Headers) -> Tenant:
        """Return the tenant of the key in the headers; see ``Authenticator``."""
        # The time of the look-up can reveal bits of the hash, but never of the key.
        digest = hashlib.sha256(_key(headers).encode(errors="surrogateescape")).digest()
        tenant = self._tenants.get(digest)
        if tenant is None:
            raise Unauthenticated("the API key is not known here", reason="UNKNOWN_API_KEY")
        return tenant

    async def follow(self) -> None:
        """Reload the file at each change, until cancelled; while it is malformed, the old keys stay valid."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Read the file again if it changed; if it is malformed, log that and keep the old keys."""
        if (renewed := self._renewal()) is not None:
            self._tenants = renewed


class RequireTenant(OwnCalls):
    """Passes only calls of known tenants, and sets ``CALLER`` to the tenant for the servicer."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the call's handler, or a handler that refuses the call."""
        try:
            CALLER.set(self._authenticator.authenticate(details.invocation_metadata or ()))
        except ServiceError as error:
            return refusal(error)
        return handler


class NewKey(NamedTuple):
    """A new key, which is shown only once, and its line for the key file."""

    key: str
    line: str


def new_key(tenant: Tenant) -> NewKey:
    """Return a new random key for a tenant, with its line for the key file.

    Raises:
        ValueError: the tenant's name is not allowed in a key file.
    """
    if not _NAME.fullmatch(tenant.name):
        raise ValueError(f"a tenant's name {NAME_RULE}; got {tenant.name!r}")
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    digest = hashlib.sha256(key.encode()).hexdigest()
    return NewKey(key, f"sha256:{digest} {tenant.name} {tenant.limits()}".rstrip())


def read_keys(path: Path) -> dict[bytes, Tenant]:
    """Return the tenants of a key file by SHA-256 digest of their keys.

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
        # The word may be a key in plain text, so the message does not repeat it.
        raise ValueError("must be sha256:<64 hexadecimal digits> <tenant>; `quire keys new` makes such lines")
    name, *options = rest
    if not _NAME.fullmatch(name):
        raise ValueError(f"a tenant's name {NAME_RULE}; got {name!r}")
    known = {f.name.replace("_", "-"): f.name for f in fields(Tenant) if f.name not in ("name", "models")}
    limits: dict[str, Any] = {}
    for option in options:
        limit, _, value = option.partition("=")
        if limit == "models" and value:
            limits[limit] = tuple(value.split(","))
            continue
        if limit not in known or not value.isascii() or not value.isdecimal() or not int(value):
            numbers = ", ".join(f"{each}=N" for each in known)
            raise ValueError(f"{option!r} is none of {numbers}, N above 0, or models=A,B")
        limits[known[limit]] = int(value)
    return bytes.fromhex(match[1]), Tenant(name, **limits)


def _key(headers: Headers) -> str:
    """Return the key in the header ``authorization`` or, if there is none, in ``x-api-key``."""
    sent = [(name.lower(), str(value)) for name, value in headers]
    values = [value for name, value in sent if name == "authorization"]
    values = values or [f"Bearer {value}" for name, value in sent if name == "x-api-key"]
    if not values:
        raise Unauthenticated(f"an API key is needed: send {_HEADER}", reason="NO_API_KEY")
    scheme, _, token = values[0].partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer" or not token:
        raise Unauthenticated(f"send one header: {_HEADER}", reason="MALFORMED_AUTHORIZATION")
    return token.strip()
