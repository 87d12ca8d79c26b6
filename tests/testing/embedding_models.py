"""Tiny random models that make embeddings, and the embeddings that torch computes with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.testing.tiny_models import load_reference

FLAGS = {
    "lasttoken": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
}
HIDDEN_SIZE = 64


def make_embedding_model(
    source: Path, folder: Path, pooling: str, *, normalizes: bool = True, **config: Any
) -> Path:
    """Copy a model and add the files of sentence-transformers; ``config`` is added to its config.json."""
    shutil.copytree(source, folder)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    if normalizes:
        kind = "sentence_transformers.models.Normalize"
        modules += [{"idx": 2, "name": "2", "path": "2_Normalize", "type": kind}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {flag: mode == pooling for mode, flag in FLAGS.items()}
    sizes = {"word_embedding_dimension": HIDDEN_SIZE, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({**sizes, **flags}))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def expected_embedding(
    folder: Path, prompt: list[int], pooling: str, *, normalizes: bool = True, dimensions: int | None = None
) -> list[float]:
    """Return the embedding of a prompt as transformers and torch compute it."""
    with torch.inference_mode():
        states = load_reference(folder).base_model(torch.tensor([prompt])).last_hidden_state[0]
        pooled = {"lasttoken": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling][:dimensions]
        values: list[float] = (pooled / pooled.norm() if normalizes else pooled).tolist()
    return values
