"""Bodies of very many JSON values are refused before they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.rpc.errors import InvalidArgument
from quire.services.router.http.shared import bodies
from quire.services.router.http.shared.bodies import INLINE_BODY_BYTES, MAX_JSON_PARTS, MAX_JSON_VALUES

MANY = MAX_JSON_PARTS + 1
BODIES = {
    "messages": ("/v1/chat/completions", '{"messages":[' + '{"role":"user"},' * MANY),
    "nested lists": ("/v1/completions", '{"prompt":"a","metadata":[' + "[],[]" * MANY),
    "empty prompts": ("/v1/completions", '{"prompt":[' + '"",' * MANY),
    "token ids": ("/v1/completions", '{"prompt":[' + "1," * (MAX_JSON_VALUES + 1)),
    "tokens": ("/detokenize", '{"tokens":[' + "1," * (MAX_JSON_VALUES + 1)),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_of_too_many_values_is_refused(http: Any, name: str) -> None:
    path, body = BODIES[name]
    async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["param"] == "body"
    assert "must hold at most" in error["message"]


@pytest.mark.parametrize(
    "text", ['"' * INLINE_BODY_BYTES, "[,{" * INLINE_BODY_BYTES, '\\"[' * INLINE_BODY_BYTES]
)
async def test_brackets_inside_a_text_do_not_count(http: Any, text: str) -> None:
    async with http.post("/tokenize", json={"prompt": text}) as answer:
        assert answer.status == 200


texts = st.text('"\\[{,a', max_size=8)
values = st.recursive(
    texts | st.integers(0, 9), lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
)


def counts(value: Any) -> tuple[int, int]:
    """Return how many texts, lists and objects, and how many commas, the JSON of a value has."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 0
    members = [*value, *value.values()] if isinstance(value, dict) else value
    inner = [counts(member) for member in members]
    return 1 + sum(part for part, _ in inner), max(len(value) - 1, 0) + sum(comma for _, comma in inner)


@given(value=values)
def test_the_count_is_exact(value: Any) -> None:
    num_parts, num_values = counts(value)
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "MAX_JSON_PARTS", num_parts)
        patch.setattr(bodies, "MAX_JSON_VALUES", num_values)
        bodies._check_values(body)
        for limit, number in (("MAX_JSON_PARTS", num_parts), ("MAX_JSON_VALUES", num_values)):
            if number:
                patch.setattr(bodies, limit, number - 1)
                with pytest.raises(InvalidArgument):
                    bodies._check_values(body)
                patch.setattr(bodies, limit, number)
