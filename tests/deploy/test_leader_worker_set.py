"""Workers whose ranks are pods of a LeaderWorkerSet: valid by its schema, and what each pod may reach."""

from __future__ import annotations

import copy
import hashlib
import lzma
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml

from quire.cli.app import make_app
from tests.deploy.test_kubernetes import (
    BASE,
    VERSIONS,
    Manifest,
    grace_seconds,
    load,
    resources,
    settings,
    variables,
)

FOLDER = BASE.parent / "leader-worker-set"
CRD = Path(__file__).parent / "schemas" / "leaderworkersets-v0.9.0.yaml.xz"
ROLES = ["prefill", "decode"]
PARTS = ["leaderTemplate", "workerTemplate"]
KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="no kubectl on PATH, which renders kustomizations")


def value_at(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def change(document: Manifest, operation: Manifest) -> None:
    """Apply an operation of a JSON patch (RFC 6902) of those that the overlay uses."""
    *path, last = (part.replace("~1", "/") for part in operation["path"].removeprefix("/").split("/"))
    parent = value_at(document, path)
    match operation["op"]:
        case "add" if last == "-":
            parent.append(operation["value"])
        case "replace":
            assert last in parent, operation["path"]
            parent[last] = operation["value"]
        case "remove":
            del parent[last]
        case other:
            raise NotImplementedError(other)


def overlaid() -> list[Manifest]:
    """Return what the overlay applies: as in kustomize, the component's replacements come before patches."""
    (overlay,) = load(FOLDER / "kustomization.yaml")
    (component,) = overlay["components"]
    (pods,) = load(FOLDER / component / "kustomization.yaml")
    manifests = copy.deepcopy(list(resources(FOLDER)))
    found = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    for replacement in pods["replacements"]:
        source = replacement["source"]
        copied = value_at(found[source["kind"], source["name"]], source["fieldPath"].split("."))
        for target in replacement["targets"]:
            for field in target["fieldPaths"]:
                *path, last = field.split(".")
                parent = value_at(found[target["select"]["kind"], target["select"]["name"]], path)
                assert last in parent, field
                parent[last] = copy.deepcopy(copied)
    for patch in overlay["patches"]:
        kind, names = patch["target"]["kind"], patch["target"].get("name", ".*")
        targets = [key for key in found if key[0] == kind and re.fullmatch(names, key[1])]
        assert targets, patch["target"]
        for key in targets:
            content = yaml.safe_load(patch["patch"])
            if isinstance(content, list):
                for operation in content:
                    change(found[key], operation)
            else:
                assert content["$patch"] == "delete"
                del found[key]
    return list(found.values())


MANIFESTS = overlaid()
SETS = {m["metadata"]["name"]: m for m in MANIFESTS if m["kind"] == "LeaderWorkerSet"}


def template(role: str, part: str) -> Manifest:
    return dict(SETS[role]["spec"]["leaderWorkerTemplate"][part])


def container(role: str, part: str) -> Manifest:
    (only,) = template(role, part)["spec"]["containers"]
    return dict(only)


def strict(schema: Manifest) -> Manifest:
    """Return a schema that refuses fields it does not know, as strict validation of Kubernetes does."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            result[name] = strict(schema[name])
    return result


@pytest.fixture(scope="module")
def definition() -> Manifest:
    """The published definition of the resource."""
    loaded: Manifest = yaml.load(lzma.decompress(CRD.read_bytes()), yaml.CSafeLoader)
    return loaded


@pytest.fixture(scope="module")
def validator(definition: Manifest) -> Any:
    (version,) = definition["spec"]["versions"]
    return jsonschema.Draft202012Validator(strict(version["schema"]["openAPIV3Schema"]))


def problems(validator: Any, manifest: Manifest) -> list[str]:
    """Return what a schema refuses in a manifest, with paths but without the schema."""
    return [f"{each.json_path}: {each.message}" for each in validator.iter_errors(manifest)]


def test_the_schema_is_the_published_one() -> None:
    digest = hashlib.sha256(lzma.decompress(CRD.read_bytes())).hexdigest()
    assert digest in (CRD.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("role", ROLES)
def test_a_set_is_valid(role: str, definition: Manifest, validator: Any) -> None:
    assert problems(validator, SETS[role]) == []
    spec, (version,) = definition["spec"], definition["spec"]["versions"]
    assert SETS[role]["apiVersion"] == f"{spec['group']}/{version['name']}"
    assert SETS[role]["kind"] == spec["names"]["kind"]
    # The schema says nothing of the set's own metadata.
    shell = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": SETS[role]["metadata"]}
    kubernetes_validate.validate(shell, VERSIONS[0], strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/startupPolcy", "LeaderCreated"),
        ("spec/leaderWorkerTemplate/restartPolicy", "Always"),
        ("spec/leaderWorkerTemplate/size", "2"),
        ("spec/leaderWorkerTemplate/leaderTemplate/metadata/label", {}),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0/livenesProbe", {}),
        ("spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/env/0/valueFrom/secretKeyReff", {}),
        ("spec/rolloutStrategy/rollingUpdateConfiguration/maxSurge", [1]),
    ],
)
def test_the_schema_refuses_what_is_wrong(path: str, value: Any, validator: Any) -> None:
    broken = copy.deepcopy(SETS["decode"])
    *parents, last = path.split("/")
    value_at(broken, parents)[last] = value
    (problem,) = problems(validator, broken)
    assert last in problem


def test_the_schema_refuses_a_set_without_pods(validator: Any) -> None:
    broken = copy.deepcopy(SETS["decode"])
    del broken["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    (problem,) = problems(validator, broken)
    assert problem == "$.spec.leaderWorkerTemplate: 'workerTemplate' is a required property"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("role", ROLES)
def test_a_template_is_a_valid_pod(role: str, part: str, version: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", **template(role, part)}
    kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "manifest",
    [manifest for manifest in MANIFESTS if manifest["kind"] != "LeaderWorkerSet"],
    ids=lambda m: f"{m['kind']}-{m['metadata']['name']}",
)
def test_the_other_manifests_are_valid(manifest: Manifest, version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_sets_take_the_place_of_the_deployments() -> None:
    (overlay,) = load(FOLDER / "kustomization.yaml")
    assert (FOLDER / overlay["resources"][0]).resolve() == BASE
    assert SETS.keys() == set(ROLES)
    assert {m["metadata"]["name"] for m in MANIFESTS if m["kind"] == "Deployment"} == {"redis", "router"}
    (pods,) = overlay["components"]
    files = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert files == {*overlay["resources"][1:], *overlay["configurations"], pods}


@pytest.mark.parametrize("role", ROLES)
def test_a_leader_is_the_worker_of_base_and_a_rank_is_less(role: str) -> None:
    (deployment,) = (m for m in load(BASE / f"{role}.yaml") if m["kind"] == "Deployment")
    base = deployment["spec"]["template"]
    (main,) = base["spec"]["containers"]
    leader, rank = template(role, "leaderTemplate"), template(role, "workerTemplate")
    assert leader["metadata"] == base["metadata"]
    assert {**leader["spec"], "containers": []} == {**base["spec"], "containers": []}
    assert {**container(role, "leaderTemplate"), "env": [], "ports": []} == {**main, "env": [], "ports": []}
    own = {
        name: main[name]
        for name in ("name", "image", "envFrom", "resources", "securityContext", "volumeMounts")
    }
    assert {
        name: each for name, each in container(role, "workerTemplate").items() if name not in ("args", "env")
    } == own
    apart: Manifest = {"containers": [], "topologySpreadConstraints": []}
    assert rank["spec"] | apart == base["spec"] | apart
    # A rank has no metrics, and nothing that selects workers selects it.
    assert rank["metadata"] == {
        "labels": {**base["metadata"]["labels"], "app.kubernetes.io/component": "rank"}
    }
    (spread,) = rank["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == rank["metadata"]["labels"]


@pytest.mark.parametrize("role", ROLES)
def test_a_group_starts_and_ends_together(role: str) -> None:
    spec = SETS[role]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["size"] >= 2
    # The leader is ready once its ranks have loaded: with LeaderReady neither would ever start.
    assert spec["startupPolicy"] == "LeaderCreated"
    # A rank that is told to end stays until its worker has drained.
    graces = {template(role, part)["spec"]["terminationGracePeriodSeconds"] for part in PARTS}
    (grace,) = graces
    assert grace >= grace_seconds(role) + 10


@pytest.mark.parametrize("role", ROLES)
def test_ranks_connect_to_the_port_of_their_leader(role: str) -> None:
    leader, rank = container(role, "leaderTemplate"), container(role, "workerTemplate")
    environment = {each["name"]: each.get("value") for each in leader["env"]}
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert environment["QUIRE_RANK_ADDRESS"] == f"0.0.0.0:{ports['ranks']}"
    assert rank["args"] == ["rank", f"$(LWS_LEADER_ADDRESS):{ports['ranks']}"]
    assert environment["QUIRE_TENSOR_PARALLEL_SIZE"] == "$(LWS_GROUP_SIZE)"
    assert "ports" not in rank


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("role", ROLES)
def test_a_pod_runs_a_command_that_reads_its_variables(role: str, part: str) -> None:
    main = container(role, part)
    verb = main["args"][0]
    command: Any = typer.main.get_command(make_app())
    assert verb in command.commands
    # Passwords that other variables contain, as $(REDIS_PASSWORD), are none of quire's.
    assert {each["name"] for each in main["env"]} - {"REDIS_PASSWORD"} <= variables(verb)
    assert main["envFrom"] == [{"configMapRef": {"name": "workers"}}]
    assert "QUIRE_TENSOR_PARALLEL_SIZE" not in settings(BASE)["workers"]


def test_ranks_read_the_model_and_the_certificates_from_the_workers_settings() -> None:
    assert variables("rank") >= {
        "QUIRE_MODEL",
        "QUIRE_THREADS",
        "QUIRE_CLUSTER_CERT",
        "QUIRE_CLUSTER_KEY",
        "QUIRE_CLUSTER_CA",
    }


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("role", ROLES)
def test_no_pod_starts_without_the_cluster_secret(role: str, part: str) -> None:
    (secret,) = (each for each in container(role, part)["env"] if each["name"] == "QUIRE_CLUSTER_SECRET")
    assert secret["valueFrom"] == {"secretKeyRef": {"name": "quire", "key": "cluster-secret"}}
    assert ("redis" in str(container(role, part)["env"])) == (part == "leaderTemplate")


def pod_labels() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each pod with its labels, those of the LeaderWorkerSet's controller among them."""
    for manifest in MANIFESTS:
        if manifest["kind"] == "Deployment":
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["metadata"]["labels"]
    for role in ROLES:
        added = {"leaderworkerset.sigs.k8s.io/name": role}
        yield role, template(role, "leaderTemplate")["metadata"]["labels"] | added
        yield f"{role}-rank", template(role, "workerTemplate")["metadata"]["labels"] | added


PODS = dict(pod_labels())
# Those of all containers, and some that nobody has.
NUM_PORTS = [6379, 7100, 7101, 8500, 8501, 8502, 9000, 9100]


def selects(selector: Manifest, pod: str) -> bool:
    labels = PODS[pod]
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", [])
    )


def rules(pod: str, direction: str) -> list[Manifest]:
    """Return the rules, "ingress" or "egress", of the policies about a pod; there is one policy at least."""
    policies = [
        m["spec"]
        for m in MANIFESTS
        if m["kind"] == "NetworkPolicy" and selects(m["spec"]["podSelector"], pod)
    ]
    assert any(direction.capitalize() in policy["policyTypes"] for policy in policies)
    return [rule for policy in policies for rule in policy.get(direction, [])]


def lets(rule: Manifest, peers: str, pod: str, port: int) -> bool:
    """Return whether a rule allows a port and a pod of this namespace, as the peer "from" or "to"."""
    return any(each["port"] == port for each in rule["ports"]) and any(
        "namespaceSelector" not in peer and selects(peer["podSelector"], pod) for peer in rule[peers]
    )


def test_ranks_reach_the_rank_port_of_their_role_and_nothing_else() -> None:
    reached = {
        (source, target, port)
        for source, target in permutations(PODS, 2)
        for port in NUM_PORTS
        if any(lets(rule, "to", target, port) for rule in rules(source, "egress"))
        and any(lets(rule, "from", source, port) for rule in rules(target, "ingress"))
    }
    ranks = {(f"{role}-rank", role, 7100) for role in ROLES}
    assert {flow for flow in reached if any(pod.endswith("rank") for pod in flow[:2])} == ranks
    assert {flow for flow in reached if flow[2] == 7100} == ranks
    assert {("router", "decode", 9000), ("prefill", "decode", 9000), ("decode", "redis", 6379)} <= reached


def test_no_other_namespace_reaches_ranks_or_their_port() -> None:
    for role in ROLES:
        assert rules(f"{role}-rank", "ingress") == []
        for rule in rules(role, "ingress"):
            if {"port": 7100} in rule["ports"]:
                assert all(peer.keys() == {"podSelector"} for peer in rule["from"])
        outside = [rule for rule in rules(f"{role}-rank", "egress") if {"port": 7100} not in rule["ports"]]
        assert [{each["port"] for each in rule["ports"]} for rule in outside] == [{53}], "names only"


def test_scalers_scale_groups_and_budgets_mean_all_their_pods(definition: Manifest) -> None:
    (version,) = definition["spec"]["versions"]
    assert version["subresources"]["scale"].keys() >= {"specReplicasPath", "labelSelectorPath"}
    scalers = {m["metadata"]["name"]: m["spec"] for m in MANIFESTS if m["kind"] == "HorizontalPodAutoscaler"}
    budgets = {m["metadata"]["name"]: m["spec"] for m in MANIFESTS if m["kind"] == "PodDisruptionBudget"}
    assert scalers.keys() == budgets.keys() == {"router", *ROLES}
    for role in ROLES:
        target = {name: SETS[role][name] for name in ("apiVersion", "kind")} | {"name": role}
        assert scalers[role]["scaleTargetRef"] == target
        assert "replicas" not in SETS[role]["spec"], "the scaler decides"
        assert {pod for pod in PODS if selects(budgets[role]["selector"], pod)} == {role, f"{role}-rank"}
    assert scalers["router"]["scaleTargetRef"]["kind"] == "Deployment"


def render(folder: Path) -> list[Manifest]:
    assert KUBECTL is not None
    done = subprocess.run([KUBECTL, "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@needs_kubectl
def test_kustomize_renders_the_same() -> None:
    rendered = render(FOLDER)
    maps = [manifest["metadata"]["name"] for manifest in rendered if manifest["kind"] == "ConfigMap"]
    text = yaml.safe_dump(rendered)
    for name in maps:
        # The name has a hash of the content wherever it is used, so that a change restarts the pods.
        plain, _, _ = name.rpartition("-")
        text = re.sub(rf"\b{name}\b", plain, text)
    for manifest in rendered:
        used = re.findall(r"'configMapRef': {'name': '([^']*)'}", str(manifest))
        assert set(used) <= set(maps), "references.yaml says where a LeaderWorkerSet has such names"
    # Tags are from base, which names the images.
    rendered = yaml.safe_load(re.sub(r"(image: quire-\w+):\S+", r"\1", text))
    found = {(m["kind"], m["metadata"]["name"]): m for m in rendered if m["kind"] != "ConfigMap"}
    for manifest in found.values():
        manifest["metadata"].pop("namespace", None)
    assert found == {(m["kind"], m["metadata"]["name"]): m for m in MANIFESTS}


@needs_kubectl
def test_the_overlay_stands_on_the_secure_one_as_well(tmp_path: Path, validator: Any) -> None:
    folder = shutil.copytree(BASE.parents[1], tmp_path / "deploy") / "kubernetes" / FOLDER.name
    file = folder / "kustomization.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace("[../base,", "[../secure,"), encoding="utf-8")
    sets = [manifest for manifest in render(folder) if manifest["kind"] == "LeaderWorkerSet"]
    assert len(sets) == len(ROLES)
    for each in sets:
        assert problems(validator, each) == []
        (leader,), (rank,) = (
            each["spec"]["leaderWorkerTemplate"][part]["spec"]["containers"] for part in PARTS
        )
        assert leader["readinessProbe"]["exec"]["command"] == ["quire", "health", "127.0.0.1:9000"]
        assert not [name for name in rank if name.endswith("Probe")]
