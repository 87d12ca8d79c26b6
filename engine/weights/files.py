"""Checks a model's weights and configuration before other libraries read them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.models.file_checks import ModelFileError, damaged, read_object
from quire.models.gguf_folder import GGUF_NAME
from quire.models.source import GENERATION_CONFIG


def check_configuration(folder: Path) -> None:
    """Check the files that describe a model.

    Raises:
        ModelFileError: one is missing or damaged.
    """
    if not isinstance(read_object(folder / "config.json").get("model_type"), str):
        raise damaged(folder / "config.json", "names no model_type")
    if (generation := folder / GENERATION_CONFIG).exists():
        read_object(generation)


def check_weights(folder: Path) -> None:
    """Check the files with a model's weights; this reads only their headers.

    Raises:
        ModelFileError: one is missing or damaged.
    """
    if (folder / GGUF_NAME).exists():
        return  # its checkpoint checks it
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"{folder} has no *.safetensors, the only format of weights that quire reads from a folder: "
            "load the model with transformers and save it again with save_pretrained"
        )
    for name in weight_files(folder):
        check_safetensors(folder / name)


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files that contain a model's weights.

    Raises:
        ModelFileError: the index of several files is missing or damaged.
    """
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    index = folder / "model.safetensors.index.json"
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise damaged(index, "has no weight_map from the names of weights to files")
    return sorted({*shards.values()})


def check_safetensors(path: Path) -> None:
    """Check that a file has a header, and as many bytes as its header says."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise damaged(path, f"is not a whole safetensors file ({error})") from error
