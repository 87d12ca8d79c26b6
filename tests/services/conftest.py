"""A served model."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.served_model import ServedModel
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer, load_model_files

VOCAB_SIZE = 320


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
