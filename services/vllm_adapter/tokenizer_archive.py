"""Packs a model's tokenizer for gateways: a zip archive, sent in pieces."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from quire.models.source import CONFIGURATION_FILES, TOKENIZER_FILES

FILES = (*TOKENIZER_FILES, *CONFIGURATION_FILES)
PIECE_BYTES = 64 << 10


def tokenizer_archive(folder: Path) -> bytes:
    """Return a zip archive of the tokenizer's files and of the model's configuration."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for path in (folder / name for name in FILES):
            if path.is_file():
                files.write(path, path.name)
    return archive.getvalue()


def pieces(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield an archive in pieces of at most ``PIECE_BYTES``; the last piece has the archive's SHA-256."""
    for start in range(0, len(archive), PIECE_BYTES):
        is_last = start + PIECE_BYTES >= len(archive)
        yield common_pb2.GetTokenizerChunk(
            data=archive[start : start + PIECE_BYTES],
            sha256=hashlib.sha256(archive).hexdigest() if is_last else "",
        )
