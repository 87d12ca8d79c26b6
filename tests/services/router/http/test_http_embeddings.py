"""OpenAI's own client, and plain requests, for embeddings and scores of scripted workers."""

from __future__ import annotations

import base64
import struct
from math import cos
from typing import Any

import openai
import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI

from quire.services.requests.embeddings import MAX_INPUTS
from tests.testing.fake_worker import embedding_of

IDS = [[5, 6, 7, 8], [9, 10]]


async def post(http: ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def test_openais_client_reads_floats_and_base64(client: AsyncOpenAI, pair: Any) -> None:
    pair["p1"].num_cached_tokens = pair["p2"].num_cached_tokens = 2
    # Without a format, the client asks for base64 and decodes it.
    by_default = await client.embeddings.create(model="tiny", input=IDS)
    floats = await client.embeddings.create(model="tiny", input=IDS, encoding_format="float")
    coded: Any = await client.embeddings.create(model="tiny", input=IDS, encoding_format="base64")
    for at, ids in enumerate(IDS):
        assert floats.data[at].embedding == pytest.approx(embedding_of(ids))
        assert by_default.data[at].embedding == pytest.approx(floats.data[at].embedding)
        encoded = base64.b64decode(coded.data[at].embedding)
        assert list(struct.unpack("<4f", encoded)) == floats.data[at].embedding
        assert (floats.data[at].index, floats.data[at].object) == (at, "embedding")
    assert (floats.object, floats.model) == ("list", "tiny")
    assert floats.usage.prompt_tokens == floats.usage.total_tokens == 6
    assert floats.usage.model_dump()["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("given", ["hello", ["hello"], IDS[0], [IDS[0]], ["hello", "world"], IDS])
async def test_every_kind_of_input(client: AsyncOpenAI, given: Any) -> None:
    several = isinstance(given, list) and not isinstance(given[0], int)
    found = await client.embeddings.create(model="tiny", input=given, user="someone")
    assert len(found.data) == (len(given) if several else 1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [[5], [400]]}, "input[1][0]"),
        ({"input": [400]}, "input[0]"),
        ({"input": ["x", "x" * 200]}, "input[1]"),
        ({"input": "x" * 200}, "input"),
        ({"input": "x", "dimensions": 2}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "mean"}, "pooling"),
    ],
)
async def test_invalid_fields_are_refused_by_name(http: ClientSession, body: Any, param: str | None) -> None:
    status, answer = await post(http, "/v1/embeddings", **body)
    if param is None:  # the tokenizer adds a special token to the empty text
        assert status == 200
    else:
        assert (status, answer["error"]["param"]) == (400, param)


async def test_another_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="other", input="hello")


async def test_the_request_id_is_that_of_the_header_or_the_body(http: ClientSession, pair: Any) -> None:
    body: Any = {"input": IDS, "request_id": "mine", "cache_salt": "s"}
    async with http.post("/v1/embeddings", json=body) as response:
        assert response.headers["X-Request-Id"] == "mine"
    calls = pair.calls("prefill")
    assert all(call.sequence.sequence_id.startswith("mine-") for call in calls)
    assert {call.sequence.cache_scope.salt for call in calls} == {"s"}


async def tokens(http: ClientSession, text: str) -> int:
    _, answer = await post(http, "/tokenize", prompt=text)
    return sum(answer["tokens"])


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2")])
async def test_scores_are_cosines(http: ClientSession, path: str, names: tuple[str, str]) -> None:
    texts = ["hello", "world", "stop"]
    sums = [await tokens(http, text) for text in texts]
    expected = [cos((sums[0] - each) / 100) for each in sums]
    status, answer = await post(http, path, **dict(zip(names, ("hello", texts), strict=True)))
    assert (status, answer["object"], answer["model"]) == (200, "list", "tiny")
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected)
    assert [(each["index"], each["object"]) for each in answer["data"]] == [(at, "score") for at in range(3)]
    _, answer = await post(http, path, **dict(zip(names, (texts, texts), strict=True)))
    assert [each["score"] for each in answer["data"]] == pytest.approx([1.0] * 3)
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_are_ranked_by_their_scores(http: ClientSession, path: str) -> None:
    documents = ["world", "hello", "stop here and say the end"]
    status, answer = await post(http, path, query="hello", documents=documents)
    results = answer["results"]
    assert status == 200
    assert results[0]["index"] == 1
    assert results[0]["relevance_score"] == pytest.approx(1.0)
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert [each["document"]["text"] for each in results] == [documents[each["index"]] for each in results]
    _, best = await post(http, path, query="hello", documents=documents, top_n=2)
    assert best["results"] == results[:2]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"documents": "x"}, "queries"),
        ("/v1/score", {"queries": "x", "text_1": "x", "documents": "x"}, "queries"),
        ("/v1/score", {"queries": ["x", "y"], "documents": ["x"] * 3}, "queries"),
        ("/v1/score", {"text_1": ["x", "x" * 200], "text_2": "x"}, "text_1"),
        ("/v1/score", {"text_1": "x", "text_2": ["x", "x" * 200]}, "text_2[1]"),
        ("/v1/score", {"queries": "x", "documents": ["x"] * MAX_INPUTS}, "documents"),
        ("/v1/rerank", {"query": "x" * 200, "documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": ["x" * 200]}, "documents[0]"),
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n"),
    ],
)
async def test_scores_that_are_refused(http: ClientSession, path: str, body: Any, param: str) -> None:
    status, answer = await post(http, path, **body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_model_without_embeddings_is_a_bad_request(pair: Any, start: Any) -> None:
    for worker in pair.workers.values():
        worker.embedding.Clear()
        worker.embedding.problem = "its folder has no modules.json of sentence-transformers"
    http = await start()
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/score", {"queries": "x", "documents": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["x"]}),
    ):
        status, answer = await post(http, path, **body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "model", "no_embeddings")
        assert "no modules.json of sentence-transformers" in answer["error"]["message"]
