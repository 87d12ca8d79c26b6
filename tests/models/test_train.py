"""Training: the rate, the first steps, and going on from a checkpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.models.source import demo_model_path
from quire.models.training.curriculum import Progress
from quire.models.training.train import Run, Settings, parse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "demo"
    out.mkdir()
    shutil.copy(demo_model_path() / "tokenizer.json", out)
    return out


def settings(folder: Path, *, steps: int = 2, resume: Path | None = None, export: bool = False) -> Settings:
    return Settings(
        out=folder,
        checkpoints=folder.parent / "checkpoints",
        resume=resume,
        export=export,
        steps=steps,
        batch=256,
        warmup=1,
    )


def test_the_rate_rises_is_constant_and_falls() -> None:
    schedule = Settings(steps=100, minutes=60.0, rate=1.0, warmup=10, decay=0.5)
    rates = [schedule.rate_at(Progress(step=step)) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10:51] == [1.0] * 41
    assert rates[51:] == pytest.approx([0.02 * left for left in range(49, -1, -1)])


def test_time_ends_a_run_too() -> None:
    schedule = Settings(steps=100, minutes=2.0, decay=0.5)
    assert schedule.share_done(Progress(step=10, seconds=90.0)) == 0.75
    assert schedule.share_done(Progress(step=80, seconds=90.0)) == 0.8
    assert schedule.share_done(Progress(step=10, seconds=120.0)) == 1.0


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(folder: Path) -> None:
    whole = Run(settings(folder))
    first = whole.steps()
    assert next(first).step == 1
    whole.save()
    assert [progress.step for progress in first] == [2]
    last = folder.parent / "checkpoints" / "last.pt"
    trained = torch.load(last, weights_only=True)["model"]
    assert whole.finished

    begun = Run(settings(folder))
    next(begun.steps())
    begun.save()
    resumed = Run(settings(folder, resume=last))
    assert resumed.progress.step == 1
    assert [progress.step for progress in resumed.steps()] == [2]
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert not (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_exports_rounded_weights(folder: Path) -> None:
    run = Run(settings(folder, steps=1, export=True))
    assert [progress.tokens > 0 for progress in run.steps()] == [True]
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert exported.dtype == torch.bfloat16
    assert run.model.dtype == torch.float32
    for name, value in exported.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name].bfloat16()), name
    assert exported.generation_config.eos_token_id == run.model.config.eos_token_id
    assert not exported.generation_config.do_sample
    assert (folder / "tokenizer.json").exists()


def test_the_command_line_has_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train"])
    assert parse() == Settings()
    monkeypatch.setattr(sys, "argv", ["train", "--steps", "7", "--no-export", "--out", "here"])
    assert parse() == Settings(steps=7, export=False, out=Path("here"))
