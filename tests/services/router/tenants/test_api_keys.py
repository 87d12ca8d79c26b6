"""API keys: their file, its renewal, and what headers prove."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from quire.rpc.errors import BadFileError, InvalidArgument, Unauthenticated
from quire.services.router.tenants.api_keys import ApiKeys, NoKeys, Tenant, new_key, read_keys
from quire.services.server.log import configure_logging


def bearer(key: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("Authorization", f"Bearer {key}")]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_the_line_of_a_new_key_is_enough_to_know_it(tmp_path: Path) -> None:
    tenant = Tenant("acme", tokens_per_minute=6000, max_requests=4, max_waiting=2, weight=3, priority=2)
    made = new_key(tenant)
    assert made.key not in made.line
    keys = ApiKeys(write(tmp_path / "keys", "# ours", "", f"{made.line}  # of march"))
    assert keys.authenticate(bearer(made.key)) == tenant
    assert len({new_key(tenant).key for _ in range(100)}) == 100


@pytest.mark.parametrize(("name", "least"), [("acme", -2), ("", -100)])
def test_a_key_says_how_urgent_requests_may_be(name: str, least: int) -> None:
    tenant = Tenant(name, priority=2)
    for allowed in (least, 0, 100):
        tenant.check_priority(allowed)
    for refused in (least - 1, 101):
        with pytest.raises(InvalidArgument, match=f"must be from {least} to 100"):
            tenant.check_priority(refused)


def test_a_key_may_have_the_header_of_anthropics_clients(tmp_path: Path) -> None:
    made = new_key(Tenant("acme"))
    keys = ApiKeys(write(tmp_path / "keys", made.line))
    assert keys.authenticate([("X-Api-Key", made.key)]) == Tenant("acme")
    assert keys.authenticate([("x-api-key", "other"), *bearer(made.key)]) == Tenant("acme")


def test_without_a_file_no_key_is_needed() -> None:
    assert NoKeys().authenticate([]) == Tenant("")


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "NO_API_KEY"),
        ([("authorization", "Basic abc")], "MALFORMED_AUTHORIZATION"),
        ([("authorization", "Bearer")], "MALFORMED_AUTHORIZATION"),
        ([("authorization", "Bearer a"), ("authorization", "Bearer a")], "MALFORMED_AUTHORIZATION"),
        ([("authorization", "Bearer quire-wrong")], "UNKNOWN_API_KEY"),
        ([("authorization", b"\xff\x00")], "MALFORMED_AUTHORIZATION"),
        ([("x-api-key", "quire-wrong")], "UNKNOWN_API_KEY"),
        ([("x-api-key", "wrong\udcff")], "UNKNOWN_API_KEY"),
        ([("x-api-key", "")], "MALFORMED_AUTHORIZATION"),
        ([("x-api-key", "a"), ("x-api-key", "a")], "MALFORMED_AUTHORIZATION"),
        ([("authorization", "Basic abc"), ("x-api-key", "a")], "MALFORMED_AUTHORIZATION"),
    ],
)
def test_headers_that_prove_no_tenant(
    tmp_path: Path, headers: list[tuple[str, str | bytes]], reason: str
) -> None:
    keys = ApiKeys(write(tmp_path / "keys", new_key(Tenant("acme")).line))
    with pytest.raises(Unauthenticated) as caught:
        keys.authenticate(headers)
    assert caught.value.reason == reason
    assert "wrong" not in caught.value.message


def test_a_hash_is_not_a_key(tmp_path: Path) -> None:
    made = new_key(Tenant("acme"))
    keys = ApiKeys(write(tmp_path / "keys", made.line))
    for stolen in (made.line.split()[0], made.line.split()[0].removeprefix("sha256:")):
        with pytest.raises(Unauthenticated):
            keys.authenticate(bearer(stolen))


def test_two_keys_of_a_tenant_share_its_limits(tmp_path: Path) -> None:
    old, new = new_key(Tenant("acme", max_requests=3)), new_key(Tenant("acme"))
    keys = ApiKeys(write(tmp_path / "keys", new.line, old.line))
    assert keys.authenticate(bearer(old.key)) == keys.authenticate(bearer(new.key))
    assert keys.authenticate(bearer(new.key)).max_requests == 3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("quire-a-key-in-clear acme", "sha256:<64"),
        ("sha256:" + "0" * 64, "sha256:<64"),
        ("sha256:" + "0" * 64 + " a/b", "a tenant's name"),
        ("sha256:" + "0" * 64 + " acme max-requests=0", "max-requests=0"),
        ("sha256:" + "0" * 64 + " acme speed=3", "speed=3"),
        ("sha256:" + "1" * 64 + " acme", "earlier line already"),
        ("sha256:" + "0" * 64 + " acme max-requests=2", "other limits for acme"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = write(tmp_path / "keys", "sha256:" + "1" * 64 + " acme max-requests=1", line)
    with pytest.raises(BadFileError, match="line 2") as caught:
        read_keys(path)
    assert problem in str(caught.value)
    assert "in-clear" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFileError, match="absent"):
        ApiKeys(tmp_path / "absent")


def test_a_changed_file_counts_and_a_broken_one_does_not(tmp_path: Path) -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    first, second = new_key(Tenant("acme")), new_key(Tenant("acme"))
    path = write(tmp_path / "keys", first.line)
    keys = ApiKeys(path)
    write(path, second.line, "")
    keys.reload()
    assert keys.authenticate(bearer(second.key)).name == "acme"
    with pytest.raises(Unauthenticated):
        keys.authenticate(bearer(first.key))
    write(path, first.line, second.line, f"{first.key} acme")
    keys.reload()
    assert keys.authenticate(bearer(second.key)).name == "acme"
    os.remove(path)
    keys.reload()
    assert keys.authenticate(bearer(second.key)).name == "acme"
    logged = stream.getvalue()
    assert logged.count("api_keys_reloaded") == 1
    assert logged.count("api_keys_not_reloaded") == 2
    assert first.key not in logged


def test_a_file_that_could_not_be_opened_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = new_key(Tenant("acme")), new_key(Tenant("acme"))
    path = write(tmp_path / "keys", first.line)
    keys = ApiKeys(path)
    write(path, second.line)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        keys.reload()
    assert keys.authenticate(bearer(first.key)).name == "acme"
    keys.reload()
    assert keys.authenticate(bearer(second.key)).name == "acme"


@pytest.mark.parametrize("name", ["", "a b", "a\nb", "ä", "x" * 65])
def test_a_tenant_has_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="a tenant's name"):
        new_key(Tenant(name))
