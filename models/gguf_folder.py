"""Finds the folder with the configuration and the tokenizer of a GGUF file, or lets a process write it."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire.models.file_checks import ModelFileError

GGUF_NAME = "model.gguf"
"""Name in the folder of the link to the file."""
_FORM = 2
"""Number of what the conversion writes; other files need another one."""


def is_gguf(source: str) -> bool:
    """Return whether a model is named by a GGUF file."""
    return source.endswith(".gguf")


def gguf_folder(path: Path) -> Path:
    """Return a folder with the files of a GGUF model that other models have beside their weights.

    It is in the assets of the hub's cache, and is written again after each change of the file. The conversion
    imports torch, so another process does it: the router stays small.

    Raises:
        FileNotFoundError: there is no such file.
        ModelFileError: quire cannot read the file; the message names the reason.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise ModelFileError(
            f"{path} is a part of a split file: merge all parts with llama-gguf-split --merge"
        )
    try:
        versions = [version("gguf"), version("transformers")]
    except PackageNotFoundError as error:
        raise ModelFileError(f"{path} needs {error.name}: pip install 'quire-llm[worker,gguf]'") from error
    from huggingface_hub import cached_assets_path

    state = path.stat()
    identity = repr((str(path), state.st_size, state.st_mtime_ns, _FORM, versions))
    folder = (
        cached_assets_path("quire", namespace="gguf") / hashlib.sha256(identity.encode()).hexdigest()[:32]
    )
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _convert(path, folder)
    return folder


def _convert(path: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "quire.models.gguf_conversion", str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"the conversion ended with {done.returncode}"]
        raise ModelFileError(
            lines[-1] if done.returncode == 2 else f"{path} cannot be converted: {lines[-1]}"
        )
