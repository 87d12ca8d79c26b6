"""Compares the files by which a router turns text into tokens and back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quire.models.source import GENERATION_CONFIG, TOKENIZER_FILES


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
