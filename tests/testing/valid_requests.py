"""Requests that the router has checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.sampling.params import ResponseOptions, SamplingParams
from quire.services.requests.division import Division
from quire.services.requests.validation import ValidRequest


def valid_request(
    token_ids: Sequence[int],
    params: dict[str, Any] | None = None,
    division: Division | None = None,
    prompt_field: str = "token_ids",
    **response: Any,
) -> ValidRequest:
    """Return a request with parameters and with options of its response; it is for up to 20 tokens."""
    return ValidRequest(
        request_id="r",
        prompt_field=prompt_field,
        prompt_token_ids=[*token_ids],
        params=SamplingParams(**{"max_tokens": 20, **(params or {})}),
        num_best=None,
        response=ResponseOptions(**response),
        format=None,
        cache_salt="",
        division=division,
    )
