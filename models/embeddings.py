"""Reads how a model turns a text into an embedding, from the files of sentence-transformers in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from quire.models.file_checks import damaged, read_json, read_object
from quire.models.source import EMBEDDING_MODULES


class Pooling(StrEnum):
    """Which hidden states of a text its embedding is the mean of: one state, or all."""

    LAST = "lasttoken"
    MEAN = "mean"
    CLS = "cls"


class NoEmbeddingsError(Exception):
    """The model makes no embeddings; the message says why."""


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a model makes embeddings.

    Attributes:
        size: number of values of an embedding.
        normalizes: whether embeddings have the length 1.
        dimensions: numbers of first values for which it was trained too (Matryoshka representation learning).
    """

    size: int
    pooling: Pooling
    normalizes: bool
    dimensions: tuple[int, ...]


def read_embedding_config(folder: Path, size: int) -> EmbeddingConfig:
    """Return how the model in a folder, with hidden states of a size, makes embeddings.

    Raises:
        NoEmbeddingsError: it makes none, or in a way that is not supported.
        ModelFileError: one of the files is damaged.
    """
    path = folder / EMBEDDING_MODULES
    if not path.exists():
        raise NoEmbeddingsError(f"its folder has no {EMBEDDING_MODULES} of sentence-transformers")
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise damaged(path, "is not a list of modules")
    names = [str(each.get("type")).rpartition(".")[2] for each in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise NoEmbeddingsError(f"quire does not compute all its modules: {', '.join(names)}")
    config = read_object(folder / "config.json")
    any_number = range(1, size + 1) if config.get("is_matryoshka") else ()
    pooling = _pooling(read_object(folder / str(modules[1].get("path")) / "config.json"))
    dimensions = tuple(config.get("matryoshka_dimensions") or any_number)
    return EmbeddingConfig(size, pooling, len(names) == 3, dimensions)


def _pooling(config: Mapping[str, Any]) -> Pooling:
    # Newer releases of sentence-transformers write "pooling_mode" and the mode, older ones a flag for each.
    flags = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    modes = {
        str(config.get("pooling_mode")),
        *(flag.removesuffix("_tokens").removesuffix("_token") for flag in flags),
    }
    known = modes - {"None", "include_prompt"}
    if len(known) == 1 and known <= set(Pooling):
        return Pooling(known.pop())
    raise NoEmbeddingsError(f"quire does not pool by {', '.join(sorted(known)) or 'nothing'}")
