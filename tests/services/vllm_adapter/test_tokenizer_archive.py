"""The archive of a tokenizer: its files and no others, whole after the pieces are put together."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from quire.services.vllm_adapter import servicer as module
from quire.services.vllm_adapter.servicer import FILES, pieces, tokenizer_archive


def test_it_has_the_tokenizers_files_and_no_weights(tmp_path: Path) -> None:
    kept = {"tokenizer.json": "é", "config.json": "{}"}
    for name, text in {**kept, "model.safetensors": "weights", "secrets.json": "{}"}.items():
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "tokenizer_config.json").mkdir()
    with zipfile.ZipFile(io.BytesIO(tokenizer_archive(tmp_path))) as archive:
        assert {name: archive.read(name).decode() for name in archive.namelist()} == kept
    assert {"tokenizer.json", "tokenizer_config.json"} < set(FILES)


@pytest.mark.parametrize("num_bytes", [1, 3, 4, 5, 8, 9])
def test_only_the_last_piece_has_the_digest_of_all(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    archive = bytes(range(num_bytes))
    sent = list(pieces(archive))
    assert b"".join(each.data for each in sent) == archive
    assert all(0 < len(each.data) <= 4 for each in sent)
    assert [each.sha256 for each in sent] == [*[""] * (len(sent) - 1), hashlib.sha256(archive).hexdigest()]
