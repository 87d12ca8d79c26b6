"""A model of the hub is read at one revision, and only the files that quire uses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from quire.models.source import find_model, model_name, pin_revision, without_revision
from tests.testing.commands import run_command

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """A cache of the hub, as a download leaves it, with two revisions of one model."""
    model = tmp_path / "hub" / "models--org--model"
    for name, commit in COMMITS.items():
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").write_text("{}")
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / name).write_text(commit)
    return tmp_path / "hub"


def find_in(cache: Path, source: str) -> str:
    """Return what a process without a network finds; huggingface_hub reads its settings once."""
    program = (
        "import sys; from quire.models.source import *\n"
        "folder = find_model(sys.argv[1]); print(folder, pin_revision(sys.argv[1], folder))"
    )
    variables = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return run_command(sys.executable, "-c", program, source, variables=variables).stdout.strip()


@pytest.mark.parametrize(("source", "name"), [("org/model", "main"), ("org/model@v1", "v1")])
def test_the_pinned_name_leads_to_the_same_files(hub_cache: Path, source: str, name: str) -> None:
    folder, pinned = find_in(hub_cache, source).split()
    assert folder == str(hub_cache / "models--org--model" / "snapshots" / COMMITS[name])
    assert pinned == f"org/model@{COMMITS[name]}"
    assert find_in(hub_cache, pinned) == f"{folder} {pinned}"


def test_only_the_files_that_quire_reads_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    asked: dict[str, Any] = {}

    def snapshot_download(name: str, revision: str | None, **patterns: list[str]) -> str:
        asked.update(patterns)
        return "/cache"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    find_model("org/model")
    repository = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "modules.json",
        "1_Pooling/config.json",
        "pytorch_model.bin",
        "model.gguf",
        "original/consolidated.00.pth",
        "original/model.safetensors",
        "onnx/model.onnx",
        "modeling_custom.py",
    ]
    assert list(filter_repo_objects(repository, **asked)) == repository[:6]


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = tmp_path / "my@model"
    folder.mkdir()
    assert find_model(str(folder)) == folder
    assert pin_revision(str(folder), folder) == without_revision(str(folder)) == str(folder)
    assert model_name(str(folder)) == "my@model"
    assert model_name("org/model@main") == "model"


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_name_that_is_no_folder_and_no_hub_id_is_not_found(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=source):
        find_model(source)
