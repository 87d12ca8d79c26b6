"""What docs/openai.md says of the fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.router.http.openai import requests
from quire.services.router.http.shared.fields import Body

DOCS = Path(__file__).parents[4] / "docs" / "openai.md"


@pytest.mark.parametrize(
    "body",
    [
        requests.CompletionRequest,
        requests.ChatCompletionRequest,
        requests.TokenizeRequest,
        requests.DetokenizeRequest,
    ],
)
def test_every_field_is_in_the_docs(body: type[Body]) -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in body.model_fields if f"`{name}`" not in text] == []
