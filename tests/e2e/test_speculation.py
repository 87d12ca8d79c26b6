"""A decode worker with draft tokens answers as one without, through the whole stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.services.local.stack import RunningStack
from tests.testing.stacks import StartStack, connect, make_prompt


@pytest.fixture(scope="module")
def guessing_stack(start_stack: StartStack) -> Iterator[RunningStack]:
    """Return a stack whose decode worker looks for what followed earlier."""
    with start_stack("llama", speculation="ngram", num_speculative_tokens=7) as stack:
        yield stack


async def test_tokens_and_stop_strings_are_those_without_guesses(
    stack: RunningStack, guessing_stack: RunningStack
) -> None:
    prompt = make_prompt(20, seed=5) * 4
    async with connect(stack) as (plain, _), connect(guessing_stack) as (guessing, _):
        num_guessed = 0
        # Few tokens are allowed, so that the answers repeat themselves.
        common: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "allowed_token_ids": [70, 71, 72]}
        variants: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.3, "seed": 7, "logprobs": 1},
        ]
        for options in variants:
            expected = await plain.generate(prompt, **common, **options)
            got = await guessing.generate(prompt, **common, **options)
            assert got.choices == expected.choices
            assert expected.usage.accepted_draft_tokens == 0
            num_guessed += got.usage.accepted_draft_tokens
            # A stop string ends the answer wherever in a step it falls.
            for length in (1, 2, 3):
                for start in range(10, 40, 3):
                    stop = expected.text[start : start + length]
                    stopped = await guessing.generate(prompt, stop=[stop], **common, **options)
                    assert stopped.text == expected.text[: expected.text.index(stop)]
                    assert stopped.finish_reason == "stop"
        assert num_guessed > 50
