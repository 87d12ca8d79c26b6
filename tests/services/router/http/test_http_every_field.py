"""No field of a body is dropped in silence: each has an effect, is documented to have none, or is refused."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import BaseModel, ValidationError

from quire.sampling.parameter import table
from quire.sampling.params import SamplingParams
from quire.services.router.http.openai.completions import CompletionWriter
from quire.services.router.http.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.services.router.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.openai.sampling_fields import GenerationFields

ROOT = Path(__file__).parents[4]
IGNORED = "Accepted, and without effect."
VALUES: dict[str, Any] = {
    "model": "x",
    "n": 3,
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 3,
    "stop": "x",
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 0.5},
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_object"},
    "top_k": 5,
    "min_p": 0.5,
    "typical_p": 0.5,
    "repetition_penalty": 0.5,
    "min_tokens": 3,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "priority": 5,
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "use_beam_search": True,
    "length_penalty": 0.5,
    "structured_outputs": {"regex": "a"},
    "prompt_logprobs": 3,
    "cache_salt": "x",
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "request_id": "x",
    "metadata": {"session_id": "x"},
    "prompt_cache_key": "x",
}
"""For each field, a value that differs from its default."""
REFUSED = {"priority": 101}
"""Values that are not served."""


def without_effect() -> set[str]:
    return {name for name, field in GenerationFields.model_fields.items() if field.description == IGNORED}


def generation(**fields: Any) -> Any:
    more = {"n": 2, "use_beam_search": True} if "length_penalty" in fields else {}
    body = CompletionRequest.model_validate({"prompt": "x", **more, **fields})
    writer = CompletionWriter(body, Mock(), body.request_id or "r", asyncio.Lock())
    return writer.generations(), body.session


def attributes() -> set[str]:
    """Return the names of all attributes that the HTTP API reads."""
    folder = ROOT / "services" / "router" / "http"
    trees = [ast.parse(path.read_text("utf-8")) for path in folder.rglob("*.py")]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_field_has_a_value_here() -> None:
    assert {*VALUES, *REFUSED, *without_effect()} == set(GenerationFields.model_fields)


@pytest.mark.parametrize("name", VALUES)
def test_a_field_has_an_effect(name: str) -> None:
    sent = generation(**{name: VALUES[name]})
    # Some fields say how the HTTP API writes an answer, and it reads them itself.
    if name in ("stream", "stream_options", "return_tokens_as_token_ids"):
        assert name in attributes()
    else:
        base = {"length_penalty": 1.5} if name == "length_penalty" else {}
        base |= {"n": 2} if name == "use_beam_search" else {}
        assert sent != generation(**base)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        generation(**{name: REFUSED[name]})


def test_fields_without_effect_are_documented() -> None:
    rows = (ROOT / "docs" / "openai.md").read_text("utf-8").splitlines()
    (row,) = (row for row in rows if "accepted, without effect" in row)
    assert without_effect() == set(re.findall(r"`([a-z_]+)`", row))


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "typical_p", "presence_penalty", "repetition_penalty"]
)
def test_the_document_has_the_ranges_of_the_table(name: str) -> None:
    (number, _) = CompletionRequest.model_json_schema()["properties"][name]["anyOf"]
    numbers = table(SamplingParams)[name].parameter.range
    assert numbers is not None
    low = number["exclusiveMinimum" if numbers.excludes_low else "minimum"]
    assert (low, number["maximum"]) == (numbers.low, numbers.high)


@pytest.mark.parametrize(
    ("page", "body"),
    [
        ("openai.md", CompletionRequest),
        ("openai.md", ChatCompletionRequest),
        ("openai.md", TokenizeRequest),
        ("openai.md", DetokenizeRequest),
        ("responses.md", ResponseRequest),
        ("embeddings.md", EmbeddingRequest),
        ("embeddings.md", ScoreRequest),
        ("embeddings.md", RerankRequest),
    ],
)
def test_every_field_is_in_the_docs(page: str, body: type[BaseModel]) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert [name for name in body.model_fields if f"`{name}`" not in text] == []
