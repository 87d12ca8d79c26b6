"""The docs name every field of the HTTP API."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from quire.services.router.http.openai import requests
from quire.services.router.http.openai.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.services.router.http.openai.responses.requests import ResponseRequest

DOCS = Path(__file__).parents[4] / "docs"


@pytest.mark.parametrize(
    ("page", "body"),
    [
        ("openai.md", requests.CompletionRequest),
        ("openai.md", requests.ChatCompletionRequest),
        ("openai.md", requests.TokenizeRequest),
        ("openai.md", requests.DetokenizeRequest),
        ("responses.md", ResponseRequest),
        ("embeddings.md", EmbeddingRequest),
        ("embeddings.md", ScoreRequest),
        ("embeddings.md", RerankRequest),
    ],
)
def test_every_field_is_in_the_docs(page: str, body: type[BaseModel]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [name for name in body.model_fields if f"`{name}`" not in text] == []
