"""Who may import whom, read from the syntax trees: imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each folder, and the folders of ours that it may import besides itself.
ALLOWED: Mapping[str, set[str]] = {
    "protos": set(),
    "kernels": set(),
    "settings": set(),
    "kvindex": set(),
    "engine": {"kernels", "kvindex", "models", "sampling", "settings"},
    "kvtransfer": {"kvindex", "protos"},
    "tokenization": {"models"},
    "client": {"protos", "sampling"},
    "models": set(),
    "llm": {"engine", "kvindex", "models", "sampling", "tokenization"},
    "routing": {"settings"},
    "sampling": {"protos"},
    "observability": {"client", "engine", "kvindex", "kvtransfer", "protos", "services"},
    "services": {
        "engine",
        "kvindex",
        "kvtransfer",
        "models",
        "protos",
        "routing",
        "sampling",
        "settings",
        "tokenization",
    },
    "simulator": {"client", "kvindex", "routing"},
    "cli": {"client", "models", "routing", "sampling", "services", "settings", "simulator"},
}
# Each room of the services, and the rooms that it may import; a file that lies in no room counts as one.
ROOMS: Mapping[str, set[str]] = {
    "server": set(),
    "requests": {"server"},
    "worker": {"server"},
    "prefill": {"worker", "server"},
    "decode": {"worker", "server"},
    "vllm_adapter": {"requests", "server", "worker"},
    "worker_process": {"decode", "prefill", "server", "vllm_adapter", "worker"},
    "router": {"requests", "server"},
    "launch": {"worker"},
    "local": {"launch", "router", "server", "worker", "worker_process"},
    "ray_cluster": {"launch", "local", "server", "worker", "worker_process"},
}
SERVICES = "quire.services"
# Modules, and what nothing that they reach may import.
BANNED: Mapping[str, set[str]] = {
    # The fork server of `quire serve` imports these two, and gRPC does not survive a fork.
    "quire.engine": {"grpc"},
    "quire.kvindex": {"torch", "transformers", "numba", "grpc"},
    "quire.kvtransfer": {"torch", "transformers", "numba"},
    "quire.client": {"torch", "transformers", "numba", "numpy"},
    "quire.tokenization": {"torch", "transformers", "numba", "grpc"},
    "quire.llm": {"grpc", "redis"},
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


def forbidden_rooms(graph: Graph) -> list[str]:
    """Return the imports that cross the rooms of the services where they may not."""
    rooms = {name: name.split(".")[2] for name in graph if name.startswith(SERVICES + ".")}
    return [
        f"{name} imports {target}"
        for name, room in sorted(rooms.items())
        for target in sorted(graph[name])
        if target.startswith(SERVICES + ".") and target.split(".")[2] not in {room, *ROOMS[room]}
    ]


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


def test_rooms_of_the_services_import_downwards_only() -> None:
    assert forbidden_rooms(read_graph()) == []


def test_no_room_imports_itself_through_others() -> None:
    assert list(TopologicalSorter(ROOMS).static_order())


@pytest.mark.parametrize("start", BANNED)
def test_what_must_stay_light_reaches_nothing_heavy(start: str) -> None:
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
    assert forbidden_rooms(graph) == [f"quire.services.worker.main imports quire.services.{target}.name"]


def test_every_room_of_the_services_has_a_rule() -> None:
    rooms = {path.stem for path in (ROOT / "services").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert set(ROOMS) == rooms - {"__init__", "__pycache__"}


def test_every_folder_of_the_package_has_a_rule() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (folders,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS"
    )
    assert {*ALLOWED, "benchmarks"} == set(folders)
