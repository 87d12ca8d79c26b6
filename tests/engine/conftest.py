"""Loaded tiny models, and what one of them needs for structured output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import tokenizers
import torch

from quire.engine.structured_output.grammar import GrammarCompiler
from quire.engine.weights.loader import LoadedModel, load_model
from quire.engine.weights.weights_file import WeightsFile, create_weights_file

# Threads that spin beside the workers' would slow both down many times over.
torch.set_num_threads(1)


FAST = {"architecture": "llama", "dtype": "float32", "weight_dtype": "auto", "kv_cache_dtype": "auto"}
"""The parameters of the model that ./test fast runs."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests of other models as slow, since kernels are compiled for each."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    if any(isinstance(value, str) and FAST.get(name, value) != value for name, value in params.items()):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def load(tiny_model: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """Return a function that loads an architecture's tiny model, once, in float32 on the CPU."""
    return cache(
        lambda architecture: load_model(str(tiny_model(architecture)), "float32", torch.device("cpu"))
    )


@pytest.fixture(scope="session")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def model(load: Callable[[str], LoadedModel]) -> LoadedModel:
    return load("llama")


@pytest.fixture
def file() -> Iterator[WeightsFile]:
    """An empty file of memory, in which workers share weights."""
    file = create_weights_file()
    yield file
    file.close()


@pytest.fixture(scope="session")
def compiler(tiny_model: Callable[[str], Path]) -> Iterator[GrammarCompiler]:
    """Compiler of formats for the tiny llama, whose end-of-sequence token is 1."""
    folder = tiny_model("llama")
    compiler = GrammarCompiler(
        lambda: (folder / "tokenizer.json").read_text("utf-8"), vocab_size=320, eos_token_ids=frozenset({1})
    )
    yield compiler
    compiler.close()


@pytest.fixture(scope="session")
def decode(tiny_model: Callable[[str], Path]) -> Callable[[list[int]], str]:
    """Return the function from the tiny llama's tokens to their text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids)
