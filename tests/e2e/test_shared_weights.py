"""Workers of one stack have one copy of the weights, which a restarted worker finds in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.client import Client
from quire.services.launch.launcher import NotStarted
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from tests.testing.stacks import GREEDY, make_prompt
from tests.testing.tiny_models import make_random_model

WEIGHTS = "model.safetensors"
PROMPT = make_prompt(40)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama with 100 MiB of weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10}
    return make_random_model("llama", tmp_path / "model", **sizes)


def config_of(model: Path) -> LocalStackConfig:
    worker = WorkerConfig(role="decode", model=str(model), dtype="float32", num_blocks=64)
    router = RouterConfig(port=0)
    return LocalStackConfig(num_prefill=2, num_decode=2, router=router, worker=worker, log_level="error")


def resident_mib(pid: int) -> int:
    """Return the memory of a process, with its part of what it shares (PSS)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("utf-8").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) >> 10


def memory_of_workers(stack: RunningStack) -> int:
    """Return the memory of all workers together, in MiB."""
    pids = [child.process.pid for child in stack.workers.values()]
    return sum(resident_mib(pid) for pid in pids if pid is not None)


def answer(stack: RunningStack) -> list[int]:
    with Client(stack.address) as client:
        return list(client.generate(PROMPT, max_tokens=8, **GREEDY).token_ids)


def kill_until_ready_again(stack: RunningStack, name: str) -> None:
    epoch = stack.ready[name].epoch
    stack.workers[name].process.kill()
    while stack.ready[name].epoch == epoch:
        for event in stack.wait():
            assert not isinstance(event, NotStarted), event.error


@pytest.mark.slow
def test_four_workers_have_one_copy_and_restart_without_the_files(model: Path, tmp_path: Path) -> None:
    tiny = make_random_model("llama", tmp_path / "tiny")
    with local_stack(config_of(tiny)) as stack:
        without_weights = memory_of_workers(stack)
    weights = (model / WEIGHTS).stat().st_size >> 20
    assert weights > 90
    with local_stack(config_of(model)) as stack:
        assert memory_of_workers(stack) - without_weights < 2 * weights
        tokens = answer(stack)
        (model / WEIGHTS).rename(tmp_path / "moved")
        for name in list(stack.workers):
            kill_until_ready_again(stack, name)
        assert answer(stack) == tokens
        assert memory_of_workers(stack) - without_weights < 2 * weights
