"""Defines the table of routes, with what the OpenAPI document says about each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata
from typing import NamedTuple

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import RETRY_AFTER_SECONDS
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.anthropic.answer_bodies import Answer, MessageEvent, TokenCount
from quire.services.router.http.anthropic.requests import CountTokensRequest, MessagesRequest
from quire.services.router.http.anthropic.writer import MessagesWriter, counting_messages
from quire.services.router.http.cluster_view import ClusterView, viewing
from quire.services.router.http.openai import answer_bodies, embeddings, requests
from quire.services.router.http.openai.chat import ChatWriter
from quire.services.router.http.openai.completions import CompletionWriter
from quire.services.router.http.openai.model_routes import ModelRoutes
from quire.services.router.http.openai.responses import answer_bodies as responses_bodies
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.openai.responses.writer import (
    ResponseWriter,
    counting_input,
    not_stored,
    resumed,
)
from quire.services.router.http.shared.answers import answering
from quire.services.router.http.shared.bodies import TENANT, json_response
from quire.services.router.http.shared.errors import ErrorBody


class Route(NamedTuple):
    """One route, its handler, and its description for the OpenAPI document."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    """Body of the answer; None: plain text."""
    event: type[BaseModel] | None = None
    """Body of each event if the request sets ``stream``."""
    is_open: bool = False
    """Whether the route needs no API key."""


def routes(servicer: GenerationServicer, registry: CollectorRegistry) -> list[Route]:
    """Return all routes of the HTTP API."""
    turn = asyncio.Lock()
    return [
        *_completion_routes(servicer, turn),
        *_response_routes(servicer, turn),
        *_message_routes(servicer, turn),
        *_embedding_routes(embeddings.EmbeddingRoutes(servicer, turn)),
        *_model_routes(ModelRoutes(servicer)),
        *_server_routes(servicer, registry),
    ]


def _completion_routes(servicer: GenerationServicer, turn: asyncio.Lock) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/completions",
            answering(servicer, turn, requests.CompletionRequest, CompletionWriter),
            "Continue texts",
            requests.CompletionRequest,
            answer_bodies.Completion,
            answer_bodies.Completion,
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            answering(servicer, turn, requests.ChatCompletionRequest, ChatWriter),
            "Answer a conversation",
            requests.ChatCompletionRequest,
            answer_bodies.ChatCompletion,
            answer_bodies.ChatCompletionChunk,
        ),
    ]


def _response_routes(servicer: GenerationServicer, turn: asyncio.Lock) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/responses",
            answering(servicer, turn, ResponseRequest, ResponseWriter),
            "Answer a conversation, as items",
            ResponseRequest,
            responses_bodies.Response,
            responses_bodies.ResponseEvent,
        ),
        Route(
            "POST",
            "/v1/responses/input_tokens",
            counting_input(servicer),
            "Count the tokens of a prompt",
            ResponseRequest,
            responses_bodies.InputTokens,
        ),
        Route(
            "GET",
            "/v1/responses/{response}",
            resumed,
            "Go on with a stream",
            answer=ErrorBody,
            event=responses_bodies.ResponseEvent,
        ),
        *(
            Route(method, f"/v1/responses/{path}", not_stored, "Say that nothing is stored", answer=ErrorBody)
            for method, path in (
                ("DELETE", "{response}"),
                ("POST", "{response}/cancel"),
                ("GET", "{response}/input_items"),
            )
        ),
    ]


def _message_routes(servicer: GenerationServicer, turn: asyncio.Lock) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/messages",
            answering(servicer, turn, MessagesRequest, MessagesWriter),
            "Answer a conversation, as Anthropic's API does",
            MessagesRequest,
            Answer,
            MessageEvent,
        ),
        Route(
            "POST",
            "/v1/messages/count_tokens",
            counting_messages(servicer),
            "Count the tokens of a conversation",
            CountTokensRequest,
            TokenCount,
        ),
    ]


def _embedding_routes(handlers: embeddings.EmbeddingRoutes) -> Iterator[Route]:
    """Yield the routes of embeddings, and of scores under all names by which clients know them."""
    embed, score, rerank = "Turn texts into embeddings", "Compare texts", "Rank documents"
    body, answer = embeddings.EmbeddingRequest, embeddings.Results
    yield Route("POST", "/v1/embeddings", handlers.embeddings, embed, body, answer)
    for path in ("/v1/score", "/score"):
        yield Route("POST", path, handlers.score, score, embeddings.ScoreRequest, answer)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        yield Route("POST", path, handlers.rerank, rerank, embeddings.RerankRequest, embeddings.Ranking)


def _model_routes(model: ModelRoutes) -> list[Route]:
    return [
        Route("GET", "/v1/models", model.models, "List the served model", answer=answer_bodies.ModelList),
        Route("GET", "/v1/models/{model}", model.model, "Describe a model", answer=answer_bodies.Model),
        Route(
            "POST",
            "/tokenize",
            model.tokenize,
            "Text or conversation to token ids",
            requests.TokenizeRequest,
            answer_bodies.Tokens,
        ),
        Route(
            "POST",
            "/detokenize",
            model.detokenize,
            "Token ids to text",
            requests.DetokenizeRequest,
            answer_bodies.Text,
        ),
        Route(
            "GET",
            "/tokenizer_info",
            model.tokenizer_info,
            "Special tokens and chat template",
            answer=answer_bodies.TokenizerInfo,
        ),
    ]


def _server_routes(servicer: GenerationServicer, registry: CollectorRegistry) -> list[Route]:
    return [
        Route(
            "DELETE",
            "/v1/sessions/{session}",
            _ending(servicer),
            "Drop the cached blocks of an ended session",
            answer=answer_bodies.EndedSession,
        ),
        Route("GET", "/v1/cluster", viewing(servicer), "The workers and their blocks", answer=ClusterView),
        Route("GET", "/version", _version, "The server's version", answer=answer_bodies.Version),
        Route("GET", "/health", _health, "Whether it lives", answer=answer_bodies.Status, is_open=True),
        Route(
            "GET",
            "/ready",
            _ready(servicer),
            "Whether it can answer",
            answer=answer_bodies.Status,
            is_open=True,
        ),
        Route("GET", "/metrics", _metrics(registry), "Prometheus metrics"),
    ]


async def _health(request: web.Request) -> web.Response:
    return json_response(answer_bodies.Status(status="alive", reason=""))


async def _version(request: web.Request) -> web.Response:
    try:
        installed = metadata.version("quire-llm")
    except metadata.PackageNotFoundError:
        # The package is not installed but run from its sources; build tools write this version then.
        installed = "0+unknown"
    return json_response(answer_bodies.Version(version=installed))


def _ending(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def ending(request: web.Request) -> web.Response:
        name = request.match_info["session"]
        asked = pb.EndSessionRequest(session=name)
        ended = await servicer.end_session(asked, request[TENANT], servicer.deadline())
        return json_response(answer_bodies.EndedSession(id=name, num_blocks=ended.num_blocks))

    return ending


def _ready(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def ready(request: web.Request) -> web.Response:
        health = servicer.health()
        answer = answer_bodies.Status(status=health.status, reason=health.reason)
        if health.is_ready:
            return json_response(answer)
        return json_response(answer, status=503, headers={"Retry-After": f"{RETRY_AFTER_SECONDS:g}"})

    return ready


def _metrics(registry: CollectorRegistry) -> Callable[[web.Request], Awaitable[web.Response]]:
    turn = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        async with turn:
            # Writing the metrics takes milliseconds, so each pass of the event loop does it once at most.
            await asyncio.sleep(0)
            return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return metrics
