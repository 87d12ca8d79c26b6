"""compose.yaml: every service keeps the rules, whoever adds the next one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from quire.cli.app import make_app
from quire.services.worker.reports.metrics import SNAPSHOT_SECONDS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GPU: dict[str, Any] = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))
ONCE = [name for name, service in SERVICES.items() if service["restart"] == "no"]
RUNNING = [name for name in SERVICES if name not in ONCE]
INSIDE = ["prefill", "decode", "redis"]
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


def default(text: str) -> str:
    """Return a value as it is when no variable is set."""
    return VARIABLE.sub(lambda match: match[2] or "", text)


def seconds(text: str) -> float:
    """Read a time in seconds, as 40s or 40."""
    return float(default(text).removesuffix("s"))


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_only_the_privileges_that_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    uid, gid = service["user"].split(":")
    assert uid.isdecimal()
    assert gid.isdecimal()
    assert int(uid) > 0
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_limited(name: str) -> None:
    limits = SERVICES[name]["deploy"]["resources"]["limits"]
    assert limits.keys() == {"cpus", "memory", "pids"}
    assert SERVICES[name]["logging"]["options"].keys() == {"max-size", "max-file"}


@pytest.mark.parametrize("name", RUNNING)
def test_a_service_has_a_health_check_and_is_restarted(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    for name, waited_for in service.get("depends_on", {}).items():
        condition = "service_completed_successfully" if name in ONCE else "service_healthy"
        assert waited_for == {"condition": condition}


@pytest.mark.parametrize("name", ["router", "router-2", "prefill", "decode", "redis"])
def test_a_service_that_is_replaced_stops_no_other_one(name: str) -> None:
    """Compose stops the services that depend on one that it replaces."""
    assert SERVICES[name]["depends_on"].keys() == {"secrets"}


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_published_only_on_the_loopback(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert default(port).startswith("127.0.0.1:")


@pytest.mark.parametrize("name", INSIDE)
def test_workers_and_redis_are_reached_only_from_inside(name: str) -> None:
    assert COMPOSE["networks"]["cluster"] == {"internal": True}
    assert SERVICES[name]["networks"] == ["cluster"]
    assert "ports" not in SERVICES[name]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_be_scaled_and_its_image_chosen(name: str) -> None:
    image = SERVICES[name]["image"]
    assert "container_name" not in SERVICES[name]
    assert image.startswith("${"), "a variable may name another image"
    tag = default(image).partition(":")[2]
    assert re.search(r"\d+\.\d+", tag), f"{default(image)} is not pinned"


@pytest.mark.parametrize("name", ["router", "router-2", "prefill", "decode"])
def test_docker_waits_for_what_the_grace_allows(name: str) -> None:
    grace = seconds(SERVICES[name]["environment"]["QUIRE_GRACE_PERIOD"])
    assert seconds(SERVICES[name]["stop_grace_period"]) >= grace + 10


@pytest.mark.parametrize("name", ["router", "router-2", "prefill", "decode"])
def test_the_settings_are_those_of_the_command(name: str) -> None:
    command: Any = typer.main.get_command(make_app())
    (verb,) = SERVICES[name]["command"]
    known = {parameter.envvar for parameter in command.commands[verb].params}
    given = {variable for variable in SERVICES[name]["environment"] if variable.startswith("QUIRE_")}
    assert given <= known


def test_two_routers_differ_only_in_their_ports() -> None:
    first, second = (dict(SERVICES[name]) for name in ("router", "router-2"))
    # The second one uses the image that the first one builds.
    del first["build"]
    assert second.pop("pull_policy") == "never"
    assert [default(port) for port in first.pop("ports")] == ["127.0.0.1:8500:8500", "127.0.0.1:8502:8502"]
    assert [default(port) for port in second.pop("ports")] == ["127.0.0.1:8510:8500", "127.0.0.1:8512:8502"]
    assert first == second


def test_workers_do_not_see_the_secrets_of_the_router() -> None:
    def see(volume: str) -> set[str]:
        return {name for name, service in SERVICES.items() if volume in service.get("volumes", [])}

    assert see("./secrets:/secrets:ro") == {"router", "router-2"}
    assert see("./certificates:/certificates:ro") == {"router", "router-2", "prefill", "decode"}

    assert see("router-secrets:/run/quire:ro,nocopy") == {"router", "router-2"}
    assert see("worker-secrets:/run/quire:ro,nocopy") == {"prefill", "decode"}
    assert see("redis-secrets:/run/quire:ro,nocopy") == {"redis"}
    assert see("grafana-secrets:/run/quire:ro,nocopy") == {"grafana"}


def test_only_the_service_that_makes_the_secrets_gives_their_volumes_an_owner() -> None:
    """Docker copies an image's folder with its owner into an empty volume when it creates a container.

    It creates all containers before the secrets are made, and in the readers' image the path belongs to root.
    """
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            if "-secrets:" in volume:
                options = volume.split(":")[2:]
                assert options == ([] if name == "secrets" else ["ro,nocopy"]), f"{name}: {volume}"


def test_nothing_has_a_password_that_is_written_here() -> None:
    """All of them come from the volumes, and only what makes them takes them from .env."""
    for name, service in SERVICES.items():
        given = [
            variable
            for variable in service.get("environment", {})
            if re.search("PASSWORD$|SECRET$|AUTH$|REDIS_URL$", variable)
        ]
        assert bool(given) == (name == "secrets")
        assert all(default(service["environment"][variable]) == "" for variable in given)
        assert not re.search(r"redis://\S*:\S*@", str(service))


def make_secrets(folder: Path, **variables: str) -> dict[str, str]:
    """Run what makes the secrets in a folder; return them by file."""
    for name in ("router", "worker", "redis", "grafana"):
        (folder / name).mkdir(exist_ok=True)
    script = ROOT / "deploy" / "compose" / "make-secrets.sh"
    environment = {"PATH": os.environ["PATH"], **variables}
    subprocess.run(["sh", script, folder], env=environment, check=True, timeout=30)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o444}
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def test_secrets_are_drawn_once_and_are_equal_where_they_must_be(tmp_path: Path) -> None:
    made = make_secrets(tmp_path)
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in made.values())
    assert made["router/cluster-secret"] == made["worker/cluster-secret"]
    assert made["router/redis-password"] == made["redis/router-password"]
    assert made["worker/redis-password"] == made["redis/worker-password"]
    assert len(made) == 8
    assert len(set(made.values())) == 5
    assert make_secrets(tmp_path) == made, "a second start keeps them"
    chosen = make_secrets(tmp_path, REDIS_WORKER_PASSWORD="mine")
    assert chosen == {**made, "worker/redis-password": "mine", "redis/worker-password": "mine"}


def test_quire_starts_with_the_secrets_of_its_volume(tmp_path: Path) -> None:
    folder, shown = tmp_path / "secrets", tmp_path / "bin"
    folder.mkdir()
    shown.mkdir()
    (folder / "cluster-secret").write_text("s3cret")
    (folder / "redis-password").write_text("pass")
    (shown / "quire").write_text('#!/bin/sh\necho "$QUIRE_CLUSTER_SECRET $QUIRE_REDIS_URL $*"\n')
    (shown / "quire").chmod(0o755)
    done = subprocess.run(
        ["sh", ROOT / "deploy" / "compose" / "quire.sh", "decode"],
        env={"PATH": f"{shown}:{os.environ['PATH']}", "SECRETS": str(folder), "REDIS_USER": "quire-worker"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout == "s3cret redis://quire-worker:pass@redis:6379/0 decode\n"


def test_the_image_has_the_folders_whose_owner_the_volumes_take() -> None:
    mounted = {
        volume.split(":")[1].rpartition("/")[2]
        for volume in SERVICES["secrets"]["volumes"]
        if "-secrets:" in volume
    }
    (names,) = re.findall(r"for name in ([\w ]+); do", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert set(names.split()) == mounted


def test_volumes_and_networks_are_declared() -> None:
    for service in SERVICES.values():
        assert set(service["networks"]) <= COMPOSE["networks"].keys()
        for volume in service.get("volumes", []):
            source = default(volume).partition(":")[0]
            assert source.startswith("./") or source in COMPOSE["volumes"]


def test_every_variable_is_in_the_example_with_its_default() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^#? ?([A-Z_0-9]+)=(\S*)", example, re.MULTILINE))
    used: dict[str, str] = dict(VARIABLE.findall(TEXT))
    assert used.keys() | {match[0] for match in VARIABLE.findall(str(GPU))} == listed.keys()
    for name, value in used.items():
        has_own_meaning = name in ("QUIRE_MODEL", "QUIRE_MODELS", "QUIRE_KV_MEMORY", "QUIRE_WORKER_IMAGE")
        assert has_own_meaning or listed[name] == value, name


def test_the_gpu_file_changes_only_workers() -> None:
    assert GPU["services"].keys() == {"prefill", "decode"}
    for service in GPU["services"].values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert service["build"]["args"].keys() <= {"TORCH", "TORCH_INDEX_URL", "APT_PACKAGES"}
        assert service["image"] != SERVICES["decode"]["image"]


def test_prometheus_finds_every_container_of_a_service() -> None:
    settings = yaml.safe_load((ROOT / "observability" / "prometheus.yml").read_text(encoding="utf-8"))
    found = {
        (name, config["port"])
        for job in settings["scrape_configs"]
        for config in job["dns_sd_configs"]
        for name in config["names"]
    }
    interval = settings["global"]["scrape_interval"]
    assert float(interval.removesuffix("s")) > SNAPSHOT_SECONDS, "the scrape of a stuck engine is lost"
    assert found == {("router", 8501), ("router-2", 8501), ("prefill", 9100), ("decode", 9100)}
