"""Parses and formats sizes of memory, such as ``512MiB``."""

from __future__ import annotations

import re

import typer

from quire.services.worker.config import DiskFolder

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``512MiB`` or ``2G``; every unit is a power of 1024.

    Raises:
        typer.BadParameter: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size: write one such as 512MiB or 2GiB")
    number, unit = match.groups()
    return int(float(number) * _BYTES[unit.upper()])


def parse_disk_folder(text: str) -> DiskFolder:
    """Return the folder and the number of bytes of a text such as ``/var/cache/quire:20GiB``.

    Raises:
        typer.BadParameter: the text is not a folder and a size.
    """
    folder, colon, size = text.rpartition(":")
    if not colon or not folder:
        raise typer.BadParameter(
            f"{text!r} is not a folder and a size: write them like /var/cache/quire:20GiB"
        )
    return DiskFolder(folder, parse_size(size))


def exact_size(num_bytes: int) -> str:
    """Return a size with the largest unit that divides it, such as ``64MiB``; ``parse_size`` reads it."""
    units = [unit for unit in "TGMK" if num_bytes and num_bytes % _BYTES[unit] == 0]
    return f"{num_bytes // _BYTES[units[0]]}{units[0]}iB" if units else str(num_bytes)


def format_size(num_bytes: int) -> str:
    """Return a size with a binary unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
