"""Checks the files of a model before other libraries read them, whose errors do not name a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

REMEDY = "download the model again, or save it again with save_pretrained"


class ModelFileError(OSError):
    """A file of a model is missing or damaged; the message names the file, the problem and the remedy."""


def damaged(path: Path, problem: object) -> ModelFileError:
    """Return the error of a file that cannot be used as it is."""
    return ModelFileError(f"{path} {problem}: {REMEDY}")


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ModelFileError: it is missing, or not a file of text.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is not text"
        raise damaged(path, f"cannot be read ({problem})") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file contains.

    Raises:
        ModelFileError: it is missing, or contains no JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise damaged(path, f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"is not a JSON object but a {type(value).__name__}")
    return value


def check_weights_and_configuration(folder: Path) -> None:
    """Check the files that the engine loads; this reads only the headers of the weights.

    Raises:
        ModelFileError: one is missing or damaged.
    """
    if not isinstance(read_object(folder / "config.json").get("model_type"), str):
        raise damaged(folder / "config.json", "names no model_type")
    if (generation := folder / "generation_config.json").exists():
        read_object(generation)
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"{folder} has no *.safetensors, the only format of weights that quire reads: "
            "load the model with transformers and save it again with save_pretrained"
        )
    for name in _weight_files(folder):
        _check_safetensors(folder / name)


def _weight_files(folder: Path) -> list[str]:
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise damaged(index, "has no weight_map from the names of weights to files")
    return sorted({*shards.values()})


def _check_safetensors(path: Path) -> None:
    """Check that a file has a header, and as many bytes as its header says."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise damaged(path, f"is not a whole safetensors file ({error})") from error
