"""Every setting is written once: options, limits and documentation agree with the configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from quire.cli.app import make_app
from quire.cli.sizes import exact_size, parse_size
from quire.services.local.config import LocalStackConfig
from quire.services.router.config import RouterConfig, SloTargets
from quire.services.worker.config import WorkerConfig
from quire.settings.setting import Panel, SettingField, settings_of, variable

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
VERBS = ("serve", "router", "prefill", "decode")
# Fields that deliberately are no flags, since a verb, a stack or a test sets them.
NOT_FLAGS = {
    WorkerConfig: {
        "role",
        "num_sharing",
        "num_weights_files",
        "cpus",
        "kv_events",
        "shared_processors",
        "shares_processors",
        "weights_file",
        "worker_id",
        "lease_ttl_seconds",
        "stream_interval",
        "max_step_seconds",
        "notice_seconds",
        "otlp_endpoint",
    },
    RouterConfig: {"http_times", "launcher_address", "otlp_endpoint", "poll_seconds", "silent_seconds"},
    LocalStackConfig: {"redis_url", "router", "worker", "log_level"},
}


def nested_configs(config: type) -> dict[str, type]:
    """Return the types of the fields that are configurations themselves, by name."""
    hints = get_type_hints(config).items()
    return {name: hint for name, hint in hints if isinstance(hint, type) and is_dataclass(hint)}


def all_settings(config: type) -> Iterator[SettingField]:
    """Yield the settings of a configuration, those of nested configurations too."""
    for each in (config, *nested_configs(config).values()):
        yield from settings_of(each).values()


def options_of(verb: str) -> dict[str, Any]:
    """Return the options of a verb by their flags; a positional argument has its name."""
    options: dict[str, Any] = {}
    for param in typer.main.get_group(make_app()).commands[verb].params:
        name = param.opts[0] if param.opts[0].startswith("--") else param.metavar
        assert name is not None
        options[name] = param
    return options


@pytest.mark.parametrize(("verb", "most"), [("prefill", 33), ("decode", 33), ("router", 30), ("serve", 50)])
def test_help_begins_with_the_most_used_settings(verb: str, most: int) -> None:
    options = [each for each in options_of(verb).values() if each.param_type_name == "option"]
    assert len(options) <= most, "before another flag is added, one that nobody needs goes"
    common = [each for each in options if each.rich_help_panel == Panel.COMMON]
    assert 5 < len(common) <= 10
    panels = [each.rich_help_panel for each in options if each.rich_help_panel]
    assert panels[0] == Panel.COMMON


@pytest.mark.parametrize("config", NOT_FLAGS)
def test_a_field_is_a_flag_or_deliberately_none(config: type) -> None:
    nested = {name for name, each in nested_configs(config).items() if settings_of(each)}
    names = {field.name for field in fields(config)}
    assert names - set(settings_of(config)) - nested == NOT_FLAGS[config] - nested
    assert NOT_FLAGS[config] <= names


def test_every_setting_of_the_services_is_an_option_of_a_verb() -> None:
    offered = {flag for verb in VERBS for flag in options_of(verb)}
    for config in NOT_FLAGS:
        assert {each.setting.flag for each in all_settings(config)} <= offered


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_has_help_and_its_variable(verb: str) -> None:
    for flag, option in options_of(verb).items():
        assert option.help, flag
        if flag not in ("--help", "--example"):
            assert option.envvar == variable(flag), flag


@pytest.mark.parametrize("verb", VERBS)
def test_an_option_has_the_limits_of_its_setting(verb: str) -> None:
    config = RouterConfig if verb in ("serve", "router") else WorkerConfig
    options = options_of(verb)
    for each in all_settings(config):
        option = options.get(each.setting.flag)
        if option is not None and hasattr(getattr(option, "type", None), "min"):
            assert (option.type.min, option.type.max) == (each.setting.minimum, each.setting.maximum)


@pytest.mark.parametrize("verb", VERBS)
def test_the_docs_name_every_option(verb: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    flags = {flag for flag in options_of(verb) if flag.startswith("--")} - {"--help"}
    assert "--host" in flags
    assert {flag for flag in flags if not re.search(rf"`{flag}\b", page)} == set()


def test_the_docs_have_the_defaults_of_the_settings() -> None:
    """A row has the defaults of its flags in the same order; what differs by verb follows a default."""
    documented: dict[str, str] = {}
    for row in re.findall(r"^\| (.*?) \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        flags, defaults = re.findall(r"`(--[a-z-]+)", row[0]), row[1].split(", ")
        if len(flags) == len(defaults):
            documented.update(zip(flags, defaults, strict=True))
    defaults_of: dict[str, set[str]] = {}
    for each in chain.from_iterable(map(all_settings, NOT_FLAGS)):
        default = each.default
        if isinstance(default, str | int | float) and not isinstance(default, bool):
            text = exact_size(int(default)) if each.setting.is_size else f"{default}".removesuffix(".0")
            defaults_of.setdefault(each.setting.flag, set()).add(text)
    shown = {flag: re.split(r"; | \(", text)[0] for flag, text in documented.items()}
    shown = {flag: text.replace("a free one", "0") for flag, text in shown.items() if flag in defaults_of}
    assert len(shown) >= 24
    assert {flag: text for flag, text in shown.items() if text not in defaults_of[flag]} == {}


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (WorkerConfig, {"num_blocks": 4, "kv_memory_bytes": 9}, "give --num-blocks or --kv-memory, not both"),
        (WorkerConfig, {"kv_events": "5557"}, "QUIRE_KV_EVENTS must be host:port"),
        (WorkerConfig, {"kv_events": "127.0.0.1:65535"}, "with a port after it"),
        (WorkerConfig, {"max_num_seqs": 600}, "--max-num-batched-tokens (512) must be at least"),
        (WorkerConfig, {"cluster_cert": Path("c")}, "needs --cluster-cert, --cluster-key and --cluster-ca"),
        (RouterConfig, {"tls_cert": Path("c")}, "TLS needs both --tls-cert and --tls-key"),
        (RouterConfig, {"tls_client_ca": Path("c")}, "TLS needs both --tls-cert and --tls-key"),
        (
            RouterConfig,
            {"cluster_cert": Path("c"), "cluster_key": Path("k")},
            "--cluster-key and --cluster-ca",
        ),
        (RouterConfig, {"redis_url": "secret@host"}, "--redis-url must be a URL of Redis"),
        (SloTargets, {"ttft_ms": -1}, "--slo-ttft-ms must be above 0; got -1"),
        (WorkerConfig, {"advertise": "myhost"}, "--advertise must be host:port, as 10.0.0.7:9000"),
        (LocalStackConfig, {"num_decode": 0}, "--decode must be at least 1; got 0"),
    ],
)
def test_a_service_names_the_flags_that_are_wrong(config: Any, values: Any, message: str) -> None:
    role = {"role": "decode"} if config is WorkerConfig else {}
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        config(**role, **values)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "rediss+cluster", "unix"])
def test_every_kind_of_redis_that_the_index_can_use_is_accepted(scheme: str) -> None:
    assert RouterConfig(redis_url=f"{scheme}://host").redis_url == f"{scheme}://host"


@pytest.mark.parametrize("num_bytes", [0, 1000, 1 << 10, 64 << 20, 3 << 29, 1 << 40])
def test_a_size_is_shown_as_it_is_parsed(num_bytes: int) -> None:
    assert parse_size(exact_size(num_bytes)) == num_bytes
