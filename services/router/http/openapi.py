"""Builds the OpenAPI document from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quire.services.router.http.routes import Route
from quire.services.router.http.shared.errors import ErrorBody

_REF = "#/components/schemas/{model}"
_VARIABLE = re.compile(r"{(\w+)}")
_ERRORS = {
    "400": "A field is wrong; param names it",
    "401": "Not authenticated",
    "403": "Not allowed",
    "404": "The model is not served here",
    "405": "The route has other methods",
    "408": "The body did not come in time",
    "409": "Aborted; try again",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too many requests; see Retry-After",
    "500": "A bug",
    "501": "Not supported by the workers",
    "503": "No worker can take it now; see Retry-After",
    "504": "The deadline passed",
}


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document that describes these routes."""
    inputs: set[type[BaseModel]] = {route.body for route in routes if route.body}
    outputs = {model for route in routes for model in (route.answer, route.event) if model} | {ErrorBody}
    _, schema = models_json_schema(
        [
            *((model, "validation") for model in sorted(inputs, key=_name)),
            *((model, "serialization") for model in sorted(outputs, key=_name)),
        ],
        ref_template=_REF,
    )
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.2.0",
        "info": {"title": "quire", "version": "1", "summary": "OpenAI-compatible API of quire"},
        "paths": paths,
        "components": {
            "schemas": schema["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path).strip('_')}",
        "responses": {
            "200": {"description": "The answer", "content": _content(route)},
            **{
                status: {"description": text, "content": {"application/json": {"schema": _ref(ErrorBody)}}}
                for status, text in _ERRORS.items()
            },
        },
    }
    if variables := _VARIABLE.findall(route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in variables
        ]
    if route.body:
        content = {"application/json": {"schema": _ref(route.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    if not route.is_open:
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
    return operation


def _content(route: Route) -> dict[str, Any]:
    if route.answer is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": _ref(route.answer)}}
    if route.event:
        content["text/event-stream"] = {"itemSchema": _event(route.event)}
    return content


def _event(model: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of an event; the data of the last event is ``[DONE]`` or an error."""
    written = [
        {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(each)}
        for each in (model, ErrorBody)
    ]
    data = {"anyOf": [{"const": "[DONE]"}, *written]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=_name(model))}


def _name(model: type[BaseModel]) -> str:
    return model.__name__
