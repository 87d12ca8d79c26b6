"""Where tokens stand in a completion's text."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientSession

from quire.services.router.http.openai.logprobs import TextOffsets
from quire.tokenization.tokenizer import Tokenizer

BOS, EOS = 0, 1


@pytest.mark.parametrize("skips", [True, False])
async def test_offsets_are_those_of_the_text(tokenizer: Tokenizer, skips: bool) -> None:
    words = await tokenizer.encode("hi 🎉 thé end", add_special_tokens=False)
    ids = [BOS, *words[:3], EOS, *words[3:], EOS]
    text = tokenizer.decode(ids, skip_special_tokens=skips)
    offsets = TextOffsets(tokenizer, skip_special_tokens=skips).of(ids)
    for at, (offset, token_id) in enumerate(zip(offsets, ids, strict=True)):
        assert text[:offset] == tokenizer.decode(ids[:at], skip_special_tokens=skips).rstrip("\ufffd")
        if token_id in (BOS, EOS):
            assert text.startswith("" if skips else ["<s>", "</s>"][token_id], offset)


async def test_offsets_continue_across_events(tokenizer: Tokenizer) -> None:
    ids = await tokenizer.encode("stop here", add_special_tokens=False)
    whole = TextOffsets(tokenizer, skip_special_tokens=True, start=5)
    pieces = TextOffsets(tokenizer, skip_special_tokens=True, start=5)
    assert whole.of(ids) == [offset for token_id in ids for offset in pieces.of([token_id])]


async def test_a_batch_whose_prompts_logprobs_are_too_large_is_refused_before_it_is_computed(
    http: ClientSession, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.services.router.outputs.answer_size.MAX_ANSWER_BYTES", 4000)
    body = {"prompt": [[5] * 10] * 20, "echo": True, "logprobs": 5, "max_tokens": 1}
    async with http.post("/v1/completions", json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (400, "logprobs", "answer_too_large")
    assert "those of 70 tokens" in error["message"]
    assert not pair["p1"].calls
    assert not pair["d1"].calls
