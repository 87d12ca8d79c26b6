"""The table of routes: what is served, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

from quire.services.errors import Unavailable
from quire.services.router.admission import RETRY_AFTER_SECONDS
from quire.services.router.http import requests, responses
from quire.services.router.http.bodies import json_response
from quire.services.router.http.chat import ChatCompletions
from quire.services.router.http.completions import Completions
from quire.services.router.http.model_routes import ModelRoutes
from quire.services.router.servicer import GenerationServicer


class Route(NamedTuple):
    """One route."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    """None: plain text."""
    event: type[BaseModel] | None = None
    """What comes instead where the body says ``stream``."""
    is_open: bool = False
    """Whether everyone may call, with or without a key."""


def routes(servicer: GenerationServicer, registry: CollectorRegistry) -> list[Route]:
    """Return all routes."""
    model = ModelRoutes(servicer)
    return [
        Route(
            "POST",
            "/v1/completions",
            Completions(servicer).answer,
            "Continue texts",
            requests.CompletionRequest,
            responses.Completion,
            responses.Completion,
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            ChatCompletions(servicer).answer,
            "Answer a conversation",
            requests.ChatCompletionRequest,
            responses.ChatCompletion,
            responses.ChatCompletionChunk,
        ),
        Route("GET", "/v1/models", model.models, "List the served model", answer=responses.ModelList),
        Route("GET", "/v1/models/{model}", model.model, "Describe a model", answer=responses.Model),
        Route(
            "POST",
            "/tokenize",
            model.tokenize,
            "Text or conversation to token ids",
            requests.TokenizeRequest,
            responses.Tokens,
        ),
        Route(
            "POST",
            "/detokenize",
            model.detokenize,
            "Token ids to text",
            requests.DetokenizeRequest,
            responses.Text,
        ),
        Route(
            "GET",
            "/tokenizer_info",
            model.tokenizer_info,
            "Special tokens and chat template",
            answer=responses.TokenizerInfo,
        ),
        Route("GET", "/version", _version, "The server's version", answer=responses.Version),
        Route("GET", "/health", _health, "Whether it lives", answer=responses.Status, is_open=True),
        Route(
            "GET", "/ready", _ready(servicer), "Whether it can answer", answer=responses.Status, is_open=True
        ),
        Route("GET", "/metrics", _metrics(registry), "Prometheus metrics"),
    ]


async def _health(request: web.Request) -> web.Response:
    return json_response(responses.Status(status="ok"))


async def _version(request: web.Request) -> web.Response:
    try:
        installed = metadata.version("quire")
    except metadata.PackageNotFoundError:
        # Run from its sources. This is how build tools write that.
        installed = "0+unknown"
    return json_response(responses.Version(version=installed))


def _ready(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def ready(request: web.Request) -> web.Response:
        if not servicer.is_ready:
            raise Unavailable(
                "no decode worker is alive; start one, or try again",
                reason="NO_DECODE_WORKER",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return json_response(responses.Status(status="ok"))

    return ready


def _metrics(registry: CollectorRegistry) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return metrics
