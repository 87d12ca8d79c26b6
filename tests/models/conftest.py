"""The tokenizer of the demo model."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from quire.models.source import demo_model_path


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
