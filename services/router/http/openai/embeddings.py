"""Serves the routes of embeddings, and of scores, which compare them."""

from __future__ import annotations

import asyncio
import math
import struct
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from operator import mul
from typing import Annotated, Any, Literal, cast

from aiohttp import web
from pydantic import BaseModel, Field

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.embeddings import MAX_INPUTS
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.openai.answer_bodies import PromptTokensDetails, Usage
from quire.services.router.http.openai.requests import TokenIds
from quire.services.router.http.shared.bodies import TENANT, read_body, request_id, response_in_thread
from quire.services.router.http.shared.fields import Body, Ignored

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
TokenIdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
Vector = Sequence[float]
Inputs = Mapping[str, str | list[int]]
"""Texts or token ids by the fields in which the client sent them."""


class EmbeddingFields(Body):
    """The fields that requests for embeddings and for scores take."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    request_id: str | None = None
    user: Ignored = None


class EmbeddingRequest(EmbeddingFields):
    """The body of ``/v1/embeddings``."""

    input: str | Texts | TokenIds | TokenIdLists
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class ScoreRequest(EmbeddingFields):
    """The body of ``/v1/score``: queries and documents, or the older names of both."""

    queries: str | Texts | None = None
    documents: str | Texts | None = None
    text_1: str | Texts | None = None
    text_2: str | Texts | None = None


class RerankRequest(EmbeddingFields):
    """The body of ``/v1/rerank``."""

    query: str
    documents: Texts
    top_n: Annotated[int, Field(ge=0, description="0 returns all.")] | None = None


class Embedding(BaseModel):
    """One embedding: its values, or their little-endian float32 bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Score(BaseModel):
    """The score of one pair of texts."""

    object: Literal["score"]
    index: int
    score: float


class Results(BaseModel):
    """The answer of ``/v1/embeddings`` and of ``/v1/score``."""

    object: Literal["list"]
    model: str
    data: list[Embedding] | list[Score]
    usage: Usage


class RankedDocument(BaseModel):
    """A document, its index in the request, and its score."""

    index: int
    document: dict[Literal["text"], str]
    relevance_score: float


class Ranking(BaseModel):
    """The answer of ``/v1/rerank``, the best document first."""

    model: str
    results: list[RankedDocument]
    usage: Usage


class EmbeddingRoutes:
    """Handles requests for embeddings and scores.

    Args:
        turn: lets large answers be written one after another.
    """

    def __init__(self, servicer: GenerationServicer, turn: asyncio.Lock) -> None:
        self._servicer = servicer
        self._turn = turn

    async def embeddings(self, request: web.Request) -> web.Response:
        """Return the embeddings of the inputs."""
        body = await read_body(request, EmbeddingRequest)
        is_one = isinstance(body.input, str) or isinstance(body.input[0], int)
        given = cast("list[Any]", [body.input] if is_one else body.input)
        inputs: Inputs = {"input": given[0]} if is_one else _indexed("input", given)
        encode: Callable[[Vector], Any] = _in_base64 if body.encoding_format == "base64" else list

        def write(model: str, vectors: list[Vector], usage: Usage) -> Results:
            encoded = enumerate(map(encode, vectors))
            data = [Embedding(object="embedding", index=at, embedding=each) for at, each in encoded]
            return Results(object="list", model=model, data=data, usage=usage)

        return await self._answer(request, body, inputs, write)

    async def score(self, request: web.Request) -> web.Response:
        """Return the score of each pair of a query and a document; one query goes with all documents."""
        body = await read_body(request, ScoreRequest)
        queries, documents = _texts(body, "queries", "text_1"), _texts(body, "documents", "text_2")
        if len(queries) not in (1, len(documents)):
            name = next(iter(queries)).partition("[")[0]
            raise InvalidArgument(name, f"must be one text or {len(documents)}, one for each document")

        def write(model: str, vectors: list[Vector], usage: Usage) -> Results:
            scores = enumerate(_scores(vectors, len(queries)))
            data = [Score(object="score", index=at, score=each) for at, each in scores]
            return Results(object="list", model=model, data=data, usage=usage)

        return await self._answer(request, body, queries | documents, write)

    async def rerank(self, request: web.Request) -> web.Response:
        """Return the documents in the order of their scores, the best first."""
        body = await read_body(request, RerankRequest)

        def write(model: str, vectors: list[Vector], usage: Usage) -> Ranking:
            ranked = sorted(enumerate(_scores(vectors, 1)), key=lambda pair: -pair[1])[: body.top_n or None]
            results = [
                RankedDocument(index=at, document={"text": body.documents[at]}, relevance_score=score)
                for at, score in ranked
            ]
            return Ranking(model=model, results=results, usage=usage)

        inputs = {"query": body.query} | _indexed("documents", body.documents)
        return await self._answer(request, body, inputs, write)

    async def _answer(
        self,
        request: web.Request,
        body: EmbeddingFields,
        inputs: Inputs,
        write: Callable[[str, list[Vector], Usage], BaseModel],
    ) -> web.Response:
        """Return what ``write`` makes of the model's name, the embeddings of the inputs, and the usage."""
        wanted = pb.EmbedRequest(
            model=body.model,
            dimensions=getattr(body, "dimensions", None),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            request_id=request_id(request, body.request_id),
            cache_salt=body.cache_salt,
        )
        for each in inputs.values():
            text, ids = (each, None) if isinstance(each, str) else (None, pb.TokenIds(ids=each))
            wanted.inputs.add(text=text, token_ids=ids)
        servicer, tenant, fields = self._servicer, request[TENANT], list(inputs)
        model = body.model or (await servicer.joined_model(tenant)).name
        try:
            headers = request.headers.items()
            answer = await servicer.embed(wanted, tenant, servicer.deadline(), headers, fields)
        except InvalidArgument as error:
            # Of several lists of inputs, the last one is the longest.
            raise error.renamed({"inputs": fields[-1].partition("[")[0]}) from error
        vectors: list[Vector] = [each.values for each in answer.embeddings]
        num_tokens = answer.usage.prompt_tokens
        usage = Usage(prompt_tokens=num_tokens, completion_tokens=0, total_tokens=num_tokens)
        usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=answer.usage.cached_prompt_tokens)
        return await response_in_thread(lambda: write(model, vectors, usage), self._turn)


def _texts(body: ScoreRequest, name: str, older: str) -> dict[str, str]:
    """Return texts by their fields; exactly one of the two names must be set."""
    given = {each: texts for each in (name, older) if (texts := getattr(body, each)) is not None}
    if len(given) != 1:
        raise InvalidArgument(name, f"must be set, or {older}, and not both")
    [(name, texts)] = given.items()
    return {name: texts} if isinstance(texts, str) else _indexed(name, texts)


def _indexed(name: str, texts: Sequence[str]) -> dict[str, str]:
    return {f"{name}[{at}]": text for at, text in enumerate(texts)}


def _scores(vectors: Sequence[Vector], num_queries: int) -> list[float]:
    """Return the cosine of each document and its query, or of all documents and the only query."""
    documents = vectors[num_queries:]
    queries = list(vectors[:num_queries]) * (len(documents) if num_queries == 1 else 1)
    lengths = [math.hypot(*one) * math.hypot(*other) for one, other in zip(queries, documents, strict=True)]
    products = [math.fsum(map(mul, one, other)) for one, other in zip(queries, documents, strict=True)]
    return [product / (length or 1.0) for product, length in zip(products, lengths, strict=True)]


def _in_base64(values: Vector) -> str:
    return b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
