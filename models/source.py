"""Finds the folder of a model: the bundled one, a local folder, or a download from the hub; digests files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from quire.models.gguf_folder import gguf_folder, is_gguf

GENERATION_CONFIG = "generation_config.json"
CONFIGURATION_FILES = ("config.json", GENERATION_CONFIG)
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
EMBEDDING_MODULES = "modules.json"
EMBEDDING_FILES = (EMBEDDING_MODULES, "1_Pooling/config.json")
MODEL_FILES = (*CONFIGURATION_FILES, *WEIGHT_FILES, *TOKENIZER_FILES, *EMBEDDING_FILES)


def demo_model_path() -> Path:
    """Return the folder of the bundled demo model."""
    return Path(__file__).resolve().parent / "demo"


def find_model(source: str, files: Sequence[str] = MODEL_FILES) -> Path:
    """Return the folder of a model; from the hub only the named files are downloaded.

    Args:
        source: a folder, a GGUF file, a hub id, or a hub id and a revision as in ``org/model@main``.
        files: patterns of file names. Weights in subfolders, such as the original checkpoint's, are left out,
            except in the numbered ones of sentence-transformers.

    Raises:
        OSError: there is no such folder, file, model or revision, or the hub cannot be reached.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if is_gguf(source):
        return gguf_folder(folder)
    if folder.is_absolute() or source.startswith((".", "~")):
        raise FileNotFoundError(f"there is no folder {source}")
    # Imported here because the import is slow and a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    name, _, revision = source.partition("@")
    try:
        found = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(files),
            ignore_patterns=["[!0-9]*/*.safetensors*"],
        )
    except HFValidationError as error:
        raise FileNotFoundError(f"{source} is neither a folder nor a hub id: {error}") from error
    return Path(found)


def without_revision(source: str) -> str:
    """Return the source without its revision; a folder or file is returned as it is."""
    return source if _is_local(source) else source.partition("@")[0]


def model_name(source: str) -> str:
    """Return the last part of a path or of a hub id, without the ending of a GGUF file."""
    return Path(without_revision(source)).name.removesuffix(".gguf")


def pin_revision(source: str, folder: Path) -> str:
    """Return a name of exactly the files in ``folder``: a hub id with its commit, or a local path itself."""
    if _is_local(source):
        return source
    # In the hub's cache the folder of a snapshot is named after its commit.
    return f"{without_revision(source)}@{folder.name}"


def _is_local(source: str) -> bool:
    return Path(source).is_dir() or is_gguf(source)


def text_digest(folder: Path) -> str:
    """Return a digest of a model's tokenizer, chat template and sampling defaults, of those that it has.

    The version of the library that has saved a file does not count.
    """
    digest = hashlib.sha256()
    for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
        path = folder / name
        if path.exists():
            content = _content(path.read_bytes())
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def _content(content: bytes) -> bytes:
    try:
        value = json.loads(content)
    except ValueError:
        return content
    if isinstance(value, dict):
        value.pop("transformers_version", None)
    return json.dumps(value, sort_keys=True).encode()
