"""The path of the bundled demo model; importing this module loads no model."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Return the folder of the demo model."""
    return Path(__file__).resolve().parent / "demo"
