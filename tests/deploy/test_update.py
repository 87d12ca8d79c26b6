"""deploy/update replaces containers without a moment in which a worker is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

UPDATE = Path(__file__).parents[2] / "deploy" / "update"
DOCKER = f"""#!{sys.executable}
import json, pathlib, sys
file = pathlib.Path(__file__).with_name("state.json")
state = json.loads(file.read_text())
words = [word for word in sys.argv[1:] if word != "compose"]
service = words[-1]
if words[0] == "ps":
    print("\\n".join(state["containers"][service]))
elif words[0] == "up":
    scale = [word for word in words if word.startswith(service + "=")]
    if scale:
        assert "--no-recreate" in words and "--no-deps" in words
        while len(state["containers"][service]) < int(scale[0].split("=")[1]):
            state["number"] += 1
            state["containers"][service].append(f"new-{{state['number']}}")
    else:
        state["containers"][service] = ["new-" + service]
elif words[0] == "inspect":
    is_asked_again = state["ran"][-1] == words
    print((state["becomes"] if is_asked_again else "starting 0"))
elif words[0] == "rm":
    for each in state["containers"].values():
        if service in each:
            each.remove(service)
state["ran"].append(words)
file.write_text(json.dumps(state))
"""


def updated(folder: Path, *services: str, becomes: str = "healthy 0") -> tuple[int, dict[str, Any]]:
    """Run the command with another docker; return its status, and what docker had and did."""
    containers = {name: [f"old-{name}"] for name in ("redis", "router", "router-2")}
    containers |= {name: [f"old-{name}-1", f"old-{name}-2"] for name in ("prefill", "decode")}
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    state = folder / "state.json"
    state.write_text(json.dumps({"containers": containers, "number": 0, "ran": [], "becomes": becomes}))
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    ended = subprocess.run([UPDATE, *services], env=environment, capture_output=True, timeout=60, check=False)
    return ended.returncode, json.loads(state.read_text())


def test_every_container_is_replaced_and_each_worker_after_its_successor_serves(tmp_path: Path) -> None:
    status, state = updated(tmp_path)
    assert status == 0
    assert {name: len(each) for name, each in state["containers"].items()} == {
        **{"redis": 1, "router": 1, "router-2": 1},
        **{"prefill": 2, "decode": 2},
    }
    assert all(name.startswith("new") for each in state["containers"].values() for name in each)
    acts = [words[0] for words in state["ran"] if words[0] in ("up", "inspect", "stop")]
    assert acts == ["up", *["up", "inspect", "inspect", "stop"] * 4, "up", "up"]
    assert all("--no-deps" in words for words in state["ran"] if words[0] == "up")


def test_only_the_services_that_are_named_are_replaced(tmp_path: Path) -> None:
    status, state = updated(tmp_path, "decode")
    assert status == 0
    assert {words[-1] for words in state["ran"] if words[0] == "up"} == {"decode"}


@pytest.mark.parametrize("becomes", ["unhealthy 0", "starting 1"])
def test_a_worker_that_does_not_become_healthy_is_removed_and_the_others_stay(
    tmp_path: Path, becomes: str
) -> None:
    status, state = updated(tmp_path, "decode", "router", becomes=becomes)
    assert status == 1
    assert state["containers"]["decode"] == ["old-decode-1", "old-decode-2"]
    assert state["containers"]["router"] == ["old-router"]
    assert "stop" not in {words[0] for words in state["ran"]}
