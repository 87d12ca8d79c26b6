"""A tiny random model in LLM and in transformers, and the demo model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.llm import LLM

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    """A new one for each test, so that its cache is empty; at rest nothing is in use."""
    with LLM(str(tiny_folder), num_blocks=256, max_model_len=400) as llm:
        yield llm
        llm.engine.check_conservation()
        assert llm.stats().num_used_blocks == 0
        assert not llm.engine.groups


@pytest.fixture(scope="session")
def demo() -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


class Reference:
    """The tiny model through transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(self, prompt: str, **options: Any) -> list[list[int]]:
        """Return the tokens of each answer."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        outputs = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
        )
        return [output[ids.shape[1] :].tolist() for output in outputs]

    def text(self, token_ids: list[int]) -> str:
        """Decode without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


@pytest.fixture(scope="session")
def reference(tiny_folder: Path) -> Reference:
    return Reference(tiny_folder)
