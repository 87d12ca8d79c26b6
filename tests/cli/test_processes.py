"""The settings of the verbs that serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import Result

from quire.cli.sizes import format_size, parse_size
from quire.services.router import app

Quire = Callable[..., Result]


@pytest.fixture
def router_configs(monkeypatch: pytest.MonkeyPatch) -> list[app.RouterConfig]:
    """Return the configurations that the verb ``router`` would run."""
    configs: list[app.RouterConfig] = []

    async def run_router(config: app.RouterConfig) -> None:
        configs.append(config)

    monkeypatch.setattr(app, "run_router", run_router)
    return configs


def test_a_flag_beats_the_environment_which_beats_the_default(
    quire: Quire, router_configs: list[app.RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    quire("router")
    monkeypatch.setenv("QUIRE_PORT", "7000")
    quire("router")
    quire("router", "--port", "7001")
    assert [config.port for config in router_configs] == [8500, 7000, 7001]


def test_workers_may_be_listed(
    quire: Quire, router_configs: list[app.RouterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    quire("router", "--worker", "a:1", "--worker", "b:2")
    monkeypatch.setenv("QUIRE_WORKER", "c:3 d:4")
    quire("router")
    assert [config.worker_addresses for config in router_configs] == [("a:1", "b:2"), ("c:3", "d:4")]


def test_the_secret_is_not_shown(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "hush-hush")
    assert "hush-hush" not in quire("router", "--help").output


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("1K", 1024), ("1.5 GiB", 3 << 29), ("512MiB", 512 << 20), ("2gb", 2 << 30)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1PiB", "12x"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (65536, "64.0 KiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_are_shown_in_binary_units(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_a_bad_size_is_a_usage_error(quire: Quire) -> None:
    result: Any = quire("serve", "--kv-memory", "12x")
    assert result.exit_code == 2
    assert "512MiB" in result.stderr
