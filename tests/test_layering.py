"""Who may import whom, read from the syntax trees: imports inside functions count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.testing.repository import ROOT, package_folders

# Each folder, and the folders of ours that it may import besides itself.
ALLOWED: Mapping[str, set[str]] = {
    "protos": set(),
    "rpc": {"protos"},
    "kernels": set(),
    "settings": set(),
    "fairness": set(),
    "kvindex": set(),
    "engine": {"fairness", "kernels", "kvindex", "models", "sampling", "settings"},
    "kvtransfer": {"kvindex", "protos", "rpc"},
    "tokenization": {"models"},
    "client": {"protos", "sampling"},
    "models": set(),
    "llm": {"engine", "kvindex", "models", "sampling", "tokenization"},
    "routing": {"settings"},
    "sampling": {"models", "protos"},
    "observability": {"engine", "kvindex", "kvtransfer", "rpc", "services"},
    "services": {
        "engine",
        "fairness",
        "kvindex",
        "kvtransfer",
        "models",
        "protos",
        "routing",
        "rpc",
        "sampling",
        "settings",
        "tokenization",
    },
    "simulator": {"client", "routing"},
    "cli": {"client", "models", "routing", "sampling", "services", "settings", "simulator"},
}
# Each folder or file inside a large room, from the ground up, and what it may import inside that room.
INSIDE: Mapping[str, Mapping[str, set[str]]] = {
    "quire.services": {
        "server": set(),
        "requests": {"server"},
        "worker": {"server"},
        "prefill": {"worker", "server"},
        "decode": {"worker", "server"},
        "vllm_adapter": {"requests", "server", "worker"},
        "worker_process": {"decode", "prefill", "server", "vllm_adapter", "worker"},
        "router": {"requests", "server"},
        "launch": {"worker"},
        "local": {"launch", "requests", "router", "server", "worker", "worker_process"},
        "doctor": {"local", "router", "worker"},
        "ray_cluster": {"launch", "local", "server", "worker", "worker_process"},
    },
    "quire.engine": {
        "config": set(),
        "device": set(),
        "errors": set(),
        "kv_cache": set(),
        "model": {"kv_cache"},
        "weights": {"kv_cache", "model"},
        "pool_memory": {"config", "kv_cache", "runner", "weights"},
        "structured_output": {"errors"},
        "sequences": {"errors", "kv_cache", "structured_output"},
        "scheduling": {"config", "errors", "kv_cache", "sequences"},
        "runner": {"kv_cache", "model", "sequences", "weights"},
        "speculation": {"config", "kv_cache", "runner", "scheduling", "sequences", "weights"},
        "ranks": {"config", "kv_cache", "model", "runner", "weights"},
        "engine": {"kv_cache", "runner", "scheduling", "sequences", "speculation", "weights"},
        "engine_thread": {"engine", "runner", "sequences"},
    },
    "quire.services.router": {
        "config": set(),
        "metrics": {"config"},
        "workers": {"config"},
        "outputs": {"workers"},
        "tenants": {"metrics"},
        "execution": {"metrics", "outputs", "workers"},
        "migration": {"execution", "outputs", "workers"},
        "sources": {"execution", "tenants", "workers"},
        "admin": {"execution", "metrics", "workers"},
        "grpc": {"execution", "metrics", "outputs", "tenants", "workers"},
        "http": {"config", "grpc", "outputs", "tenants"},
        "public_servers": {"config", "grpc", "http", "metrics", "tenants"},
        "app": {
            "admin",
            "config",
            "execution",
            "grpc",
            "http",
            "metrics",
            "migration",
            "public_servers",
            "sources",
            "tenants",
            "workers",
        },
    },
    "quire.services.worker": {
        "config": set(),
        "state": set(),
        "identity": {"state"},
        "reports": {"state"},
        "requests": {"identity", "reports", "state"},
        "blocks": {"config"},
        "lifecycle": {"config", "identity", "reports", "state"},
        "parts": {"blocks", "identity", "lifecycle", "reports", "requests", "state"},
        "prompt_steps": {"parts", "requests"},
        "servicer": {"blocks", "parts", "reports"},
        "main": {"blocks", "config", "identity", "lifecycle", "parts", "state"},
    },
    "quire.services.router.http": {
        "shared": set(),
        "anthropic": {"shared"},
        "openai": {"shared"},
        "cluster_view": {"shared"},
        "page": set(),
        "routes": {"anthropic", "cluster_view", "openai", "shared"},
        "openapi": {"routes", "shared"},
        "server": {"openapi", "page", "routes", "shared"},
    },
}
SERVICES = "quire.services"
# Modules, and what nothing that they reach may import.
BANNED: Mapping[str, set[str]] = {
    # The fork server of `quire serve` imports these two, and gRPC does not survive a fork.
    "quire.engine": {"grpc"},
    "quire.kvindex": {"torch", "transformers", "numba", "grpc"},
    "quire.kvtransfer": {"torch", "transformers", "numba"},
    "quire.rpc": {"torch", "transformers", "numba", "numpy", "redis"},
    "quire.client": {"torch", "transformers", "numba", "numpy"},
    "quire.tokenization": {"torch", "transformers", "numba", "grpc"},
    "quire.llm": {"grpc", "redis"},
    "quire.fairness": {"torch", "transformers", "numba", "numpy", "grpc"},
    "quire.routing": {"torch", "transformers", "numba", "grpc", "redis", "asyncio"},
    "quire.sampling": {"torch", "transformers", "numba", "numpy", "grpc"},
    "quire.simulator": {"torch", "transformers", "numba", "quire.engine", "quire.kernels"},
    "quire.services.router": {
        "torch",
        "transformers",
        "safetensors",
        "numba",
        "quire.engine",
        "quire.kernels",
    },
}
Graph = Mapping[str, set[str]]


def imports_of(source: str) -> Iterator[str]:
    """Yield the absolute names that a module imports; ``from a import b`` counts as a.b, a module maybe."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def read_graph() -> Graph:
    """Return what each module of ours imports."""
    graph: dict[str, set[str]] = {}
    for folder in ALLOWED:
        for path in (ROOT / folder).rglob("*.py"):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                parts = path.relative_to(ROOT).with_suffix("").parts
                name = ".".join(("quire", *(part for part in parts if part != "__init__")))
                graph[name] = set(imports_of(path.read_text(encoding="utf-8")))
    return graph


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def forbidden_edges(graph: Graph) -> list[str]:
    """Return the imports that cross folders where they may not."""
    folder_of = {name: name.split(".")[1] for name in graph}
    return [
        f"{name} imports {target}"
        for name, targets in sorted(graph.items())
        for target in sorted(targets)
        if is_within(target, "quire")
        and target.split(".")[1] not in {folder_of[name], *ALLOWED[folder_of[name]]}
    ]


def forbidden_inside(graph: Graph, package: str, allowed: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that cross the rooms inside a package where they may not."""
    depth = package.count(".") + 1
    rooms = {name: name.split(".")[depth] for name in graph if name.startswith(package + ".")}
    return [
        f"{name} imports {target}"
        for name, room in sorted(rooms.items())
        for target in sorted(graph[name])
        if target.startswith(package + ".") and target.split(".")[depth] not in {room, *allowed[room]}
    ]


def module_graph(graph: Graph) -> Graph:
    """Return which modules of ours each module imports; ``from a import b`` may import a module or a name."""
    return {
        name: {
            target if target in graph else target.rpartition(".")[0]
            for target in targets
            if target in graph or target.rpartition(".")[0] in graph
        }
        - {name}
        for name, targets in graph.items()
    }


def banned_imports(graph: Graph, start: str, banned: set[str]) -> list[str]:
    """Return the banned imports of all that a package reaches."""
    reached = {name for name in graph if is_within(name, start)}
    waiting = list(reached)
    while waiting:
        targets = graph[waiting.pop()]
        found = {name for name in graph if any(is_within(target, name) for target in targets)} - reached
        reached |= found
        waiting.extend(found)
    return [
        f"{name}, reached from {start}, imports {target}"
        for name in sorted(reached)
        for target in sorted(graph[name])
        if any(is_within(target, ban) for ban in banned)
    ]


def test_folders_import_downwards_only() -> None:
    assert forbidden_edges(read_graph()) == []


@pytest.mark.parametrize("package", INSIDE)
def test_rooms_inside_import_downwards_only(package: str) -> None:
    assert forbidden_inside(read_graph(), package, INSIDE[package]) == []


@pytest.mark.parametrize("package", INSIDE)
def test_no_room_imports_itself_through_others(package: str) -> None:
    assert list(TopologicalSorter(INSIDE[package]).static_order())


def test_no_module_imports_itself_through_others() -> None:
    """Imports for type checkers count, too."""
    assert list(TopologicalSorter(module_graph(read_graph())).static_order())


@pytest.mark.parametrize("start", BANNED)
def test_light_modules_reach_no_heavy_imports(start: str) -> None:
    assert banned_imports(read_graph(), start, BANNED[start]) == []


def test_the_rules_can_fail() -> None:
    upward = "def late():\n    from quire.services.server import log"
    graph = {
        "quire.client.x": set(imports_of(upward)),
        "quire.services.server.log": set(imports_of("import torch.nn")),
    }
    assert forbidden_edges(graph) == ["quire.client.x imports quire.services.server.log"]
    assert banned_imports(graph, "quire.client", {"torch"}) == [
        "quire.services.server.log, reached from quire.client, imports torch.nn"
    ]


@pytest.mark.parametrize("target", ["prefill.calls", "decode", "vllm_adapter.servicer", "worker_process"])
def test_the_rule_of_the_rooms_can_fail(target: str) -> None:
    late = f"def late():\n    from {SERVICES}.{target} import name\n    from {SERVICES}.server import log"
    graph = {"quire.services.worker.main": set(imports_of(late)), "quire.services": set()}
    found = forbidden_inside(graph, SERVICES, INSIDE[SERVICES])
    assert found == [f"quire.services.worker.main imports quire.services.{target}.name"]


def test_the_rule_of_the_modules_can_fail() -> None:
    hidden = "if TYPE_CHECKING:\n    from quire.engine.a import A"
    graph = {
        "quire.engine.a": set(imports_of("from quire.engine import b")),
        "quire.engine.b": set(imports_of(hidden)),
    }
    with pytest.raises(CycleError):
        list(TopologicalSorter(module_graph(graph)).static_order())


@pytest.mark.parametrize("package", INSIDE)
def test_every_room_inside_has_a_rule(package: str) -> None:
    folder = ROOT.joinpath(*package.split(".")[1:])
    rooms = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert set(INSIDE[package]) == rooms - {"__init__", "__pycache__"}


def test_every_folder_of_the_package_has_a_rule() -> None:
    assert {*ALLOWED, "benchmarks"} == set(package_folders())


def test_no_test_file_imports_another() -> None:
    statement = re.compile(r"^\s*(from|import) tests\..*\b(test_\w+|conftest)\b", re.MULTILINE)
    paths = (ROOT / "tests").rglob("*.py")
    assert [path for path in paths if statement.search(path.read_text("utf-8"))] == []
