"""A served model, and authorities that sign certificates."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from quire.services.served_model import ServedModel
from quire.services.tls import TlsFiles
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files

VOCAB_SIZE = 320


class Authority:
    """Signs certificates and writes them to files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.file = folder / f"ca-{id(self)}.pem"
        self.ca.cert_pem.write_to_path(str(self.file))

    def other(self) -> Authority:
        """Return an authority of which this one's clients know nothing."""
        return Authority(self.folder)

    def issue(self, name: str, *, days: int = 1) -> TlsFiles:
        """Write a certificate for a name; a negative number of days makes one that has expired."""
        until = datetime.now(UTC) + timedelta(days=days)
        issued = self.ca.issue_cert(name, not_before=until - timedelta(days=400), not_after=until)
        files = TlsFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key", self.file)
        files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        files.key.write_bytes(issued.private_key_pem.bytes())
        return files


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def model(model_folder: Path, tokenizer: Tokenizer) -> ServedModel:
    return ServedModel(
        name="tiny",
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({1}),
        block_size=4,
        cache_descriptor=b"tiny",
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(load_model_files(str(model_folder))),
    )
