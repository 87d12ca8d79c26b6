"""Chooses the device that a model runs on."""

from __future__ import annotations

import torch

DEVICES = ("auto", "cpu", "cuda")


def choose_device(name: str = "auto") -> torch.device:
    """Return the device with a name of ``DEVICES``; "auto" is a GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {name!r}")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError(
            "device 'cuda' needs a GPU that torch can use, and there is none: choose 'cpu' or 'auto'"
        )
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")
