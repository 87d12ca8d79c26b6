"""How a model's folder says that it makes embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.models.embeddings import EmbeddingConfig, NoEmbeddingsError, Pooling, read_embedding_config
from quire.models.file_checks import ModelFileError

MODULES = ("Transformer", "Pooling", "Normalize")
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}


def folder(at: Path, pooling: Any, modules: tuple[str, ...] = MODULES, **config: Any) -> Path:
    types = [
        {"type": f"sentence_transformers.models.{name}", "path": f"{i}_{name}"}
        for i, name in enumerate(modules)
    ]
    (at / "modules.json").write_text(json.dumps(types))
    (at / "config.json").write_text(json.dumps(config))
    (at / "1_Pooling").mkdir()
    (at / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return at


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (LAST, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True, "include_prompt": False}, Pooling.CLS),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, Pooling.LAST),
    ],
)
def test_kinds_of_pooling(tmp_path: Path, pooling: Any, kind: Pooling) -> None:
    found = read_embedding_config(folder(tmp_path, pooling), 8)
    assert found == EmbeddingConfig(8, kind, normalizes=True, dimensions=())


def test_without_normalize(tmp_path: Path) -> None:
    assert not read_embedding_config(folder(tmp_path, LAST, MODULES[:2]), 8).normalizes


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [
        ({"is_matryoshka": True}, (1, 2, 3, 4)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [2]}, (2,)),
        ({"is_matryoshka": False}, ()),
    ],
)
def test_dimensions(tmp_path: Path, config: Any, dimensions: tuple[int, ...]) -> None:
    assert read_embedding_config(folder(tmp_path, LAST, **config), 4).dimensions == dimensions


@pytest.mark.parametrize(
    ("pooling", "modules", "problem"),
    [
        ({"pooling_mode_max_tokens": True}, MODULES, "does not pool by max"),
        ({**LAST, "pooling_mode_mean_tokens": True}, MODULES, "does not pool by lasttoken, mean"),
        ({}, MODULES, "does not pool by nothing"),
        (LAST, (*MODULES[:2], "Dense", "Normalize"), "Transformer, Pooling, Dense, Normalize"),
    ],
)
def test_unsupported_embedding_models_are_refused(
    tmp_path: Path, pooling: Any, modules: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(NoEmbeddingsError, match=problem):
        read_embedding_config(folder(tmp_path, pooling, modules), 8)


def test_a_causal_model_makes_none(tmp_path: Path) -> None:
    with pytest.raises(NoEmbeddingsError, match=r"no modules\.json"):
        read_embedding_config(tmp_path, 8)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"modules\.json is not a list of modules"):
        read_embedding_config(tmp_path, 8)
