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
from quire.services.requests.served_model import ServedModel
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.anthropic.answer_bodies import Answer, MessageEvent, TokenCount
from quire.services.router.http.anthropic.requests import CountTokensRequest, MessagesRequest
from quire.services.router.http.anthropic.writer import MessagesWriter, counting_messages
from quire.services.router.http.cluster_view import ClusterView, viewing
from quire.services.router.http.openai.answer_bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    EndedSession,
    Model,
    ModelList,
    Status,
    Text,
    TokenizerInfo,
    Tokens,
    Version,
)
from quire.services.router.http.openai.chat import ChatWriter
from quire.services.router.http.openai.completions import CompletionWriter
from quire.services.router.http.openai.embeddings import (
    EmbeddingRequest,
    EmbeddingRoutes,
    Ranking,
    RerankRequest,
    Results,
    ScoreRequest,
)
from quire.services.router.http.openai.model_routes import ModelRoutes
from quire.services.router.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from quire.services.router.http.openai.responses.answer_bodies import InputTokens, Response, ResponseEvent
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.openai.responses.writer import (
    ResponseWriter,
    counting_input,
    not_stored,
    resumed,
)
from quire.services.router.http.shared.answers import AnswerWriter, B, answering
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
        *_answer_routes(servicer, turn),
        *_response_routes(),
        *_embedding_routes(EmbeddingRoutes(servicer, turn)),
        *_model_routes(ModelRoutes(servicer)),
        *_server_routes(servicer, registry),
    ]


def _answer_routes(servicer: GenerationServicer, turn: asyncio.Lock) -> list[Route]:
    """Return the routes that generate, and those that count the tokens of their prompts."""

    def route(
        path: str,
        summary: str,
        writer: Callable[[B, ServedModel, str, asyncio.Lock], AnswerWriter[B]],
        body: type[B],
        answer: type[BaseModel],
        event: type[BaseModel],
    ) -> Route:
        return Route("POST", path, answering(servicer, turn, body, writer), summary, body, answer, event)

    as_items = "Answer a conversation, as items"
    as_anthropic = "Answer a conversation, as Anthropic's API does"
    count, count_messages = "Count the tokens of a prompt", "Count the tokens of a conversation"
    count_input, counting = counting_input(servicer), counting_messages(servicer)
    chat = ChatCompletionRequest, ChatCompletion, ChatCompletionChunk
    return [
        route(
            "/v1/completions", "Continue texts", CompletionWriter, CompletionRequest, Completion, Completion
        ),
        route("/v1/chat/completions", "Answer a conversation", ChatWriter, *chat),
        route("/v1/responses", as_items, ResponseWriter, ResponseRequest, Response, ResponseEvent),
        Route("POST", "/v1/responses/input_tokens", count_input, count, ResponseRequest, InputTokens),
        route("/v1/messages", as_anthropic, MessagesWriter, MessagesRequest, Answer, MessageEvent),
        Route("POST", "/v1/messages/count_tokens", counting, count_messages, CountTokensRequest, TokenCount),
    ]


def _response_routes() -> Iterator[Route]:
    """Yield the routes about earlier responses."""
    path = "/v1/responses/{response}"
    yield Route("GET", path, resumed, "Go on with a stream", answer=ErrorBody, event=ResponseEvent)
    for method, end in (("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        yield Route(method, path + end, not_stored, "Say that nothing is stored", answer=ErrorBody)


def _embedding_routes(handlers: EmbeddingRoutes) -> Iterator[Route]:
    """Yield the routes of embeddings, and of scores under all names by which clients know them."""
    embed, score, rerank = "Turn texts into embeddings", "Compare texts", "Rank documents"
    yield Route("POST", "/v1/embeddings", handlers.embeddings, embed, EmbeddingRequest, Results)
    for path in ("/v1/score", "/score"):
        yield Route("POST", path, handlers.score, score, ScoreRequest, Results)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        yield Route("POST", path, handlers.rerank, rerank, RerankRequest, Ranking)


def _model_routes(model: ModelRoutes) -> list[Route]:
    to_ids, about = "Text or conversation to token ids", "Special tokens and chat template"
    return [
        Route("GET", "/v1/models", model.models, "List the served model", answer=ModelList),
        Route("GET", "/v1/models/{model}", model.model, "Describe a model", answer=Model),
        Route("POST", "/tokenize", model.tokenize, to_ids, TokenizeRequest, Tokens),
        Route("POST", "/detokenize", model.detokenize, "Token ids to text", DetokenizeRequest, Text),
        Route("GET", "/tokenizer_info", model.tokenizer_info, about, answer=TokenizerInfo),
    ]


def _server_routes(servicer: GenerationServicer, registry: CollectorRegistry) -> list[Route]:
    session, end = "/v1/sessions/{session}", "Drop the cached blocks of an ended session"
    ready = _ready(servicer)
    return [
        Route("DELETE", session, _ending(servicer), end, answer=EndedSession),
        Route("GET", "/v1/cluster", viewing(servicer), "The workers and their blocks", answer=ClusterView),
        Route("GET", "/version", _version, "The server's version", answer=Version),
        Route("GET", "/health", _health, "Whether it lives", answer=Status, is_open=True),
        Route("GET", "/ready", ready, "Whether it can answer", answer=Status, is_open=True),
        Route("GET", "/metrics", _metrics(registry), "Prometheus metrics"),
    ]


async def _health(request: web.Request) -> web.Response:
    return json_response(Status(status="alive", reason=""))


async def _version(request: web.Request) -> web.Response:
    try:
        installed = metadata.version("quire-llm")
    except metadata.PackageNotFoundError:
        # The package is not installed but run from its sources; build tools write this version then.
        installed = "0+unknown"
    return json_response(Version(version=installed))


def _ending(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def ending(request: web.Request) -> web.Response:
        name = request.match_info["session"]
        asked = pb.EndSessionRequest(session=name)
        ended = await servicer.end_session(asked, request[TENANT], servicer.deadline())
        return json_response(EndedSession(id=name, num_blocks=ended.num_blocks))

    return ending


def _ready(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def ready(request: web.Request) -> web.Response:
        health = servicer.health()
        answer = Status(status=health.status, reason=health.reason)
        if health.is_ready:
            return json_response(answer)
        return json_response(answer, status=503, headers={"Retry-After": f"{RETRY_AFTER_SECONDS:g}"})

    return ready


def _metrics(registry: CollectorRegistry) -> Callable[[web.Request], Awaitable[web.Response]]:
    turn = asyncio.Lock()

    async def metrics(request: web.Request) -> web.Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except (TypeError, ValueError):
            # The client accepts a version that is not a number.
            encode, content_type = choose_encoder("")
        async with turn:
            # Writing the metrics takes milliseconds, so each pass of the event loop does it once at most.
            await asyncio.sleep(0)
            return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return metrics
