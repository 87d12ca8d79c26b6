"""The manifests: valid by the published schemas, and about each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from quire.cli.app import make_app
from quire.services.worker.config import WorkerConfig

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"
SECURE = BASE.parent / "secure"
REDIS = ROOT / "deploy" / "redis"
VERSIONS = ["1.31", "1.37"]
Manifest = dict[str, Any]


def load(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def resources(folder: Path) -> Iterator[Manifest]:
    """Yield what a kustomization applies."""
    (kustomization,) = load(folder / "kustomization.yaml")
    for name in kustomization["resources"]:
        path = folder / name
        yield from resources(path) if path.is_dir() else load(path)


MANIFESTS = list(resources(BASE))
DEPLOYMENTS = {m["metadata"]["name"]: m["spec"] for m in MANIFESTS if m["kind"] == "Deployment"}
PODS = {name: spec["template"]["spec"] for name, spec in DEPLOYMENTS.items()}
OURS = ["router", "prefill", "decode"]


def of_kind(kind: str) -> list[Manifest]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def container(name: str) -> Manifest:
    (only,) = PODS[name]["containers"]
    return dict(only)


def selects(selector: Manifest, deployment: str) -> bool:
    """Return whether a selector takes a deployment's pods."""
    labels = DEPLOYMENTS[deployment]["template"]["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def settings(folder: Path) -> dict[str, dict[str, str]]:
    """Return the variables of a kustomization's ConfigMaps: of "router" and of "workers"."""
    (kustomization,) = load(folder / "kustomization.yaml")
    return {
        each["name"]: dict(line.split("=") for line in each["literals"])
        for each in kustomization["configMapGenerator"]
    }


def grace_seconds(name: str) -> float:
    """Return the QUIRE_GRACE_PERIOD of a deployment."""
    return float(settings(BASE)["router" if name == "router" else "workers"]["QUIRE_GRACE_PERIOD"])


def variables(verb: str) -> set[str]:
    """Return the variables that a verb reads."""
    command: Any = typer.main.get_command(make_app())
    return {parameter.envvar for parameter in command.commands[verb].params}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_is_valid(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schemas_refuse_a_misspelt_field() -> None:
    (router,) = (m for m in load(BASE / "router.yaml") if m["kind"] == "Deployment")
    router["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(router, VERSIONS[0], strict=True)


def test_every_file_is_applied() -> None:
    (kustomization,) = load(BASE / "kustomization.yaml")
    files = {path.name for path in BASE.iterdir()} - {
        "kustomization.yaml",
        "adapter-rules.yaml",
        "prometheus.yaml",
    }
    assert files == {name for name in kustomization["resources"] if name.endswith(".yaml")}
    assert DEPLOYMENTS.keys() == {"redis", *OURS}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_has_only_the_privileges_that_it_needs(name: str) -> None:
    pod, main = PODS[name], container(name)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in main["resources"]["limits"]
    assert main["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert "readinessProbe" in main
    assert "livenessProbe" in main


@pytest.mark.parametrize("name", OURS)
def test_a_pod_is_killed_later_than_its_process_ends_by_itself(name: str) -> None:
    stop = container(name).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
    drain = float(stop[1]) + grace_seconds(name)
    assert PODS[name]["terminationGracePeriodSeconds"] >= drain + 10


@pytest.mark.parametrize("name", OURS)
def test_ports_are_those_of_the_images(name: str) -> None:
    target = "router" if name == "router" else "worker"
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (stage,) = re.findall(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", dockerfile, re.MULTILINE | re.DOTALL)
    ports = {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    assert f"ENV QUIRE_PORT={ports['grpc']} QUIRE_METRICS_PORT={ports['metrics']}" in stage
    assert container(name)["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
    assert container(name)["livenessProbe"]["httpGet"] == {"path": "/health", "port": "metrics"}
    annotations = DEPLOYMENTS[name]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])


def test_budgets_scalers_services_and_policies_mean_pods_that_are_there() -> None:
    for budget in of_kind("PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"], budget["metadata"]["name"])
    for scaler in of_kind("HorizontalPodAutoscaler"):
        assert scaler["spec"]["scaleTargetRef"]["name"] == scaler["metadata"]["name"]
        assert scaler["metadata"]["name"] in DEPLOYMENTS
        assert "replicas" not in DEPLOYMENTS[scaler["metadata"]["name"]], "the scaler decides"
    for service in of_kind("Service"):
        assert selects({"matchLabels": service["spec"]["selector"]}, service["metadata"]["name"])
    closed = [policy["spec"]["podSelector"] for policy in of_kind("NetworkPolicy")]
    assert {} in closed, "what no policy names is closed"
    for name in DEPLOYMENTS:
        assert any(selects(selector, name) for selector in closed if selector)
    assert {s["metadata"]["name"] for s in of_kind("HorizontalPodAutoscaler")} == set(OURS)
    assert {b["metadata"]["name"] for b in of_kind("PodDisruptionBudget")} == set(OURS)


def test_autoscalers_ask_for_metrics_that_workers_have() -> None:
    source = (ROOT / "services" / "worker" / "reports" / "metrics.py").read_text(encoding="utf-8")
    exported = set(re.findall(r'"(quire_\w+)"', source))
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in of_kind("HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "Pods"
    }
    assert asked == {"quire_requests_waiting", "quire_kv_cache_usage_ratio"}
    assert asked <= exported
    (rules,) = load(BASE / "adapter-rules.yaml")
    query = rules["rules"]["custom"][0]["seriesQuery"]
    assert all(name in query for name in asked)
    (scrape,) = yaml.safe_load((BASE / "prometheus.yaml").read_text(encoding="utf-8"))
    given = {rule.get("target_label") for rule in scrape["relabel_configs"]}
    assert set(re.findall(r'(\w+)!=""', query)) <= given


def test_the_users_of_redis_are_those_of_the_index() -> None:
    assert (REDIS / "users.acl").read_text() == (ROOT / "kvindex" / "users.acl").read_text()


def test_there_are_two_routers_at_least_and_one_stays() -> None:
    (scaler,) = (m for m in load(BASE / "router.yaml") if m["kind"] == "HorizontalPodAutoscaler")
    assert scaler["spec"]["minReplicas"] >= 2
    (budget,) = (m for m in load(BASE / "router.yaml") if m["kind"] == "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] >= 1
    (deployment,) = (m for m in load(BASE / "router.yaml") if m["kind"] == "Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_workers_can_inform_routers_before_they_are_killed() -> None:
    assert WorkerConfig(role="decode").notice_seconds < min(map(grace_seconds, OURS))


@pytest.mark.parametrize("folder", [BASE, SECURE], ids=lambda folder: folder.name)
def test_settings_are_those_of_the_commands(folder: Path) -> None:
    found = settings(folder)
    assert found["router"].keys() <= variables("router")
    assert found["workers"].keys() <= variables("prefill") & variables("decode")
    for name in OURS:
        (reference,) = container(name)["envFrom"]
        assert reference["configMapRef"]["name"] == ("router" if name == "router" else "workers")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_rollout_waits_as_long_as_a_pod_may_start(name: str) -> None:
    probe = container(name).get("startupProbe", {"periodSeconds": 0, "failureThreshold": 0})
    (deployment,) = (each for each in of_kind("Deployment") if each["metadata"]["name"] == name)
    patience = deployment["spec"].get("progressDeadlineSeconds", 600)
    assert patience > probe["periodSeconds"] * probe["failureThreshold"] + 60


def test_prometheus_gives_pods_the_jobs_that_dashboards_select() -> None:
    (scrape,) = yaml.safe_load((BASE / "prometheus.yaml").read_text(encoding="utf-8"))
    rules = {rule["target_label"]: rule for rule in scrape["relabel_configs"] if "target_label" in rule}
    assert rules["job"]["source_labels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    for name in OURS:
        (deployment,) = (each for each in of_kind("Deployment") if each["metadata"]["name"] == name)
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == name


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_no_pod_starts_without_the_cluster_secret_and_the_passwords(name: str) -> None:
    needed = {
        variable["name"]: variable
        for variable in container(name)["env"]
        if re.search("PASSWORD$|SECRET$", variable["name"])
    }
    assert ("QUIRE_CLUSTER_SECRET" in needed) == (name in OURS)
    assert any("PASSWORD" in variable for variable in needed)
    for variable in needed.values():
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference["name"] == "quire"
        assert not reference.get("optional", False)
    assert not re.search(r"redis://\S*:(?!\$\()\S*@", str(container(name)))
    assert of_kind("Secret") == [], "a password that is written here is known to everybody"


@pytest.mark.parametrize("name", OURS)
def test_secrets_are_optional_and_only_the_router_has_its_own(name: str) -> None:
    mounted = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
    volumes = {each["name"]: each["secret"] for each in PODS[name]["volumes"] if "secret" in each}
    assert volumes.keys() == {"certificates", *(["secrets"] if name == "router" else [])}
    assert all(secret["optional"] for secret in volumes.values())
    files = settings(SECURE)["router" if name == "router" else "workers"].values()
    assert {value.rpartition("/")[0] for value in files if "/" in value} == {
        mounted[each] for each in volumes
    }


def test_clients_are_the_namespaces_that_are_named() -> None:
    (policy,) = (p["spec"] for p in of_kind("NetworkPolicy") if p["metadata"]["name"] == "router")
    for rule in policy["ingress"]:
        for peer in rule["from"]:
            assert peer["namespaceSelector"]["matchLabels"]


def test_the_secure_overlay_keeps_the_probes_which_ask_a_port_without_tls() -> None:
    (overlay,) = load(SECURE / "kustomization.yaml")
    assert (SECURE / overlay["resources"][0]).resolve() == BASE
    (service,) = overlay["patches"]
    assert service["target"] == {"kind": "Service", "name": "router"}


def test_the_gpu_overlay_patches_containers_that_are_there() -> None:
    (overlay,) = load(BASE.parent / "gpu" / "kustomization.yaml")
    assert (BASE.parent / "gpu" / overlay["resources"][0]).resolve() == BASE
    (patch,) = overlay["patches"]
    (patched,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"]
    targets = patch["target"]["name"].split("|")
    assert targets == ["prefill", "decode"]
    assert all(container(name)["name"] == patched["name"] for name in targets)
    assert patched["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_ranks_share_a_pod_and_have_processors_each(name: str, version: str) -> None:
    folder = BASE.parent / "tensor-parallel"
    (overlay,) = load(folder / "kustomization.yaml")
    assert (folder / overlay["resources"][0]).resolve() == BASE
    (generated,) = overlay["configMapGenerator"]
    assert generated["behavior"] == "merge"
    assert settings(folder)["workers"].keys() <= variables("prefill") & variables("decode")
    num_ranks = int(settings(folder)["workers"]["QUIRE_TENSOR_PARALLEL_SIZE"])
    (patch,) = overlay["patches"]
    assert name in patch["target"]["name"].split("|")
    (patched,) = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]["containers"]
    # A list of containers is merged by their names.
    (deployment,) = (m for m in load(BASE / f"{name}.yaml") if m["kind"] == "Deployment")
    (main,) = deployment["spec"]["template"]["spec"]["containers"]
    assert patched["name"] == main["name"]
    main |= patched
    kubernetes_validate.validate(deployment, version, strict=True)
    requested, limited = (int(main["resources"][each]["cpu"]) for each in ("requests", "limits"))
    assert requested == limited
    assert requested % num_ranks == 0
