"""Real stacks: router, workers and Redis as processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.source import demo_model_path
from quire.routing.placement import PolicyConfig
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from tests.testing.stacks import StartStack
from tests.testing.thinking_model import END_TOKEN, copy_with_thinking

# Threads that spin beside the workers' would slow both down many times over.
torch.set_num_threads(1)

OF_STACKS, OF_ROUTERS, OF_WORKERS = (
    {field.name for field in fields(config)} for config in (LocalStackConfig, RouterConfig, WorkerConfig)
)


@pytest.fixture(scope="session")
def start_stack(tiny_model: Callable[[str], Path]) -> StartStack:
    """Return a function that starts a stack of an architecture's tiny model."""

    def start(architecture: str, **settings: Any) -> AbstractContextManager[RunningStack]:
        assert set(settings) <= OF_STACKS | OF_ROUTERS | OF_WORKERS
        # The shortest prompts cross processes too.
        router = {"port": 0, "placing": PolicyConfig(local_prefill_tokens=0)}
        worker = {"role": "decode", "model": str(tiny_model(architecture)), "dtype": "float32"}
        config = LocalStackConfig(
            **_of(OF_STACKS, settings),
            router=RouterConfig(**{**router, **_of(OF_ROUTERS, settings)}),
            worker=WorkerConfig(**{**worker, "num_blocks": 2048, **_of(OF_WORKERS, settings)}),
            log_level="error",
        )
        return local_stack(config)

    return start


def _of(names: set[str], settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


@pytest.fixture(scope="session")
def stack(start_stack: StartStack) -> Iterator[RunningStack]:
    """Run one prefill and one decode worker of the tiny Llama, for all tests that leave it as it was.

    A test that stops or kills a process, or that needs other settings, starts a stack of its own.
    """
    with start_stack("llama") as running:
        yield running


def demo_stack_of(model: Path) -> AbstractContextManager[RunningStack]:
    """Run the demo model, or a copy of it, with the HTTP API."""
    config = LocalStackConfig(
        router=RouterConfig(port=0, http_port=0, served_model_name="demo"),
        worker=WorkerConfig(role="decode", model=str(model), served_model_name="demo", dtype="float32"),
        log_level="error",
    )
    return local_stack(config)


@pytest.fixture(scope="session")
def demo_stack() -> Iterator[RunningStack]:
    """Run the demo model with the HTTP API, for all tests that leave it as it was."""
    with demo_stack_of(demo_model_path()) as running:
        yield running


@pytest.fixture(scope="session")
def thinking_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Run the demo model with a template that reasons and calls tools, for tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("thinking") / "demo"
    with demo_stack_of(copy_with_thinking(demo_model_path(), folder, end_token=END_TOKEN)) as running:
        yield running
