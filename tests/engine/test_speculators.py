"""A draft model must have the vocabulary of the model that verifies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.config import EngineConfig
from quire.engine.speculation.speculators import DraftModelError, load_draft_model
from quire.engine.weights.loader import LoadedModel
from tests.testing.tiny_engine import CPU
from tests.testing.tiny_models import make_random_model


def test_another_vocabulary_is_refused(
    tmp_path: Path, load: Callable[[str], LoadedModel], tiny_model: Callable[[str], Path]
) -> None:
    other = make_random_model("llama", tmp_path / "other", vocab_size=400)
    model = load("llama")
    config = EngineConfig(str(tiny_model("llama")), dtype="float32", speculation=str(other))
    with pytest.raises(DraftModelError, match="has logits for 400 tokens, the model for 320"):
        load_draft_model(config, model, CPU)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<bos>"', '"<begin>"'))
    with pytest.raises(DraftModelError, match="different vocabularies"):
        load_draft_model(config, model, CPU)
