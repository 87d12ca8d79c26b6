"""Where the bundled model is; importing this loads nothing."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """Return the folder of the demo model."""
    return Path(__file__).resolve().parent / "demo"
