"""A GGUF file is served by prefill and decode workers like any other model."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from quire.models.notes import held_out
from quire.models.source import demo_model_path
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig
from tests.testing.gguf_files import write_gguf
from tests.testing.stacks import answers_to, connect


async def test_the_demo_model_in_8_bits_answers_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    path = write_gguf(demo_model_path(), tmp_path / "demo.gguf", GGMLQuantizationType.Q8_0)
    config = LocalStackConfig(
        router=RouterConfig(port=0), worker=WorkerConfig(role="decode", model=str(path)), log_level="error"
    )
    examples = held_out(40, 20)
    with local_stack(config) as stack:
        async with connect(stack) as (client, _):
            answers = await answers_to(client, examples)
            assert (await client.model_info()).model == "demo"
    assert sum(a == e.expected for a, e in zip(answers, examples, strict=True)) >= 39
