"""Checks a model's configuration and weights before other libraries read them; of weights only headers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from quire.models.file_checks import ModelFileError, damaged, read_object
from quire.models.gguf_folder import GGUF_NAME, is_gguf
from quire.models.safetensors_header import StoredTensor, read_safetensors
from quire.models.source import GENERATION_CONFIG


def check_local_model(source: str) -> None:
    """Check a model as ``check_model_files`` does if it is a folder or a GGUF file; hub ids are not checked.

    Raises:
        OSError: as for ``check_model_files``.
    """
    if (path := Path(source)).is_dir():
        check_model_files(path)
    elif is_gguf(source) and path.is_file() and find_spec("gguf") is not None:
        # Only the extra "gguf" installs what it needs; without it workers refuse the file.
        from quire.models.gguf_header import read_header

        read_header(path)


def check_model_files(folder: Path) -> None:
    """Check the configuration and the weights.

    Raises:
        OSError: the folder holds no model, or a file is missing or damaged; the message names the file, and
            the tensor if there is one.
    """
    check_configuration(folder)
    if not (folder / GGUF_NAME).exists():  # its checkpoint checks it
        read_weight_files(folder)


def check_configuration(folder: Path) -> None:
    """Check the files that describe a model.

    Raises:
        OSError: the folder holds no model, or one of them is missing or damaged.
    """
    if (folder / "adapter_config.json").exists():
        raise OSError(
            f"{folder} holds an adapter (adapter_config.json), which is no model: "
            "serve its model with --lora name=folder, or merge it into its model"
        )
    if not isinstance(read_object(folder / "config.json").get("model_type"), str):
        raise damaged(folder / "config.json", "names no model_type")
    if (generation := folder / GENERATION_CONFIG).exists():
        read_object(generation)


def read_weight_files(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """Return the files with a model's weights, and the tensors of each by their names.

    Raises:
        ModelFileError: one is missing or damaged, or lacks a tensor that the index of several files names.
    """
    if not any(folder.glob("*.safetensors")):
        raise ModelFileError(
            f"{folder} has no *.safetensors, the only format of weights that quire reads from a folder: "
            "load the model with transformers and save it again with save_pretrained"
        )
    if (whole := folder / "model.safetensors").exists():
        return {whole: read_safetensors(whole)}
    index = folder / "model.safetensors.index.json"
    content = read_object(index)
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise damaged(index, "has no weight_map from the names of weights to files")
    if not isinstance(content.get("metadata"), dict):
        raise damaged(index, 'has no "metadata", without which transformers does not read it')
    for tensor, name in places.items():
        if not (folder / name).exists():
            raise damaged(folder / name, f"does not exist, and {index.name} says that it has tensor {tensor}")
    files = {folder / name: read_safetensors(folder / name) for name in sorted({*places.values()})}
    for tensor, name in places.items():
        if tensor not in files[folder / name]:
            raise damaged(folder / name, f"has no tensor {tensor}, which {index.name} says that it has")
    return files
