"""Defines the kinds of fields that the bodies of all APIs are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from quire.sampling.parameter import table
from quire.sampling.params import ResponseOptions, SamplingParams
from quire.services.requests.validation import MAX_STOP_STRING_CHARS
from quire.services.router.tenants.session_name import session_in_body


def limits(name: str, kind: type = SamplingParams) -> Any:
    """Return the constraints that the table of parameters has for a number or a list."""
    parameter = table(kind)[name].parameter
    if parameter.range is None:
        return Field(max_length=parameter.max_items)
    low, high = parameter.range.low, parameter.range.high
    return Field(gt=low, le=high) if parameter.range.excludes_low else Field(ge=low, le=high)


TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
# The keys of a JSON object are always strings, so numbers have to be parsed.
TokenIdKey = Annotated[int, Field(ge=0, lt=1 << 32, strict=False)]
TokenCount = Annotated[int, Field(ge=0, lt=1 << 31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]
LogprobCount = Annotated[int, limits("logprobs", ResponseOptions)]
Ignored = Annotated[Any, Field(description="Accepted, and without effect.")]


def _without_later_errors(schema: Any) -> None:
    """Let all lists of a schema report only their first wrong item.

    Otherwise pydantic collects an error for each item and each kind that it may have, which takes seconds.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for each in schema.values():
            _without_later_errors(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            _without_later_errors(each)


def _allow_nulls(schema: dict[str, Any]) -> None:
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = {"type": "null"}


class Body(BaseModel):
    """A JSON object without unknown members; a null counts as an absent member."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_allow_nulls
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _without_later_errors(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Return the object without its nulls, so that a null is allowed even for an unknown member."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class AnswerFields(Body):
    """The fields of every request for an answer, in any API."""

    model: str | None = None
    stream: bool | None = None
    request_id: str | None = Field(None, description="For logs; instead of the header X-Request-Id.")

    @property
    def session(self) -> str:
        """Name of the request's session; it is empty if the body gives none."""
        # Not every API has both fields.
        return session_in_body(getattr(self, "prompt_cache_key", None), getattr(self, "metadata", None))
