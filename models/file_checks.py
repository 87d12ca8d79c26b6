"""Checks the files of a model before other libraries read them, whose errors do not name a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    value = read_json(path)
    if not isinstance(value, dict):
        raise damaged(path, f"is not a JSON object but a {type(value).__name__}")
    return value


def read_json(path: Path) -> Any:
    """Return the JSON value that a file contains.

    Raises:
        ModelFileError: it is missing, or contains no JSON.
    """
    try:
        return json.loads(read_text(path))
    except ValueError as error:
        raise damaged(path, f"is not valid JSON ({error})") from error
