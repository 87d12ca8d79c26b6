"""Workers of two revisions behind one router: which get requests, and where answers go on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from tests.testing.fake_worker import generation, ids_of, stream
from tests.testing.rpc_errors import error_of
from tests.testing.until import LIMIT_SECONDS, until

NEW = {"cache_descriptor": b'{"arithmetic":"a","model_digest":"new"}'}
NEXT = {"cache_descriptor": b'{"arithmetic":"b","model_digest":"new"}'}


def num_calls(cluster: Any, *names: str) -> int:
    return sum(len(cluster[name].calls) for name in names)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_half_a_revision_gets_nothing_and_a_whole_one_its_share(cluster: Any, role: str) -> None:
    await cluster.add("old-p", "prefill")
    await cluster.add("old-d", "decode")
    await cluster.add("half", role, **NEW)
    other = await cluster.add("other", "decode" if role == "prefill" else "prefill", is_draining=True, **NEW)
    stub = await cluster.start()
    workers = cluster.running.workers
    await asyncio.gather(*(stream(stub) for _ in range(8)))
    embed = pb.EmbedRequest(inputs=[pb.EmbedInput(text="hello")])
    await stub.Embed(embed)
    assert num_calls(cluster, "half") == 0
    await other.serve_again()
    await until(lambda: len(workers.receiving()) == 2)
    await asyncio.gather(*(stream(stub) for _ in range(8)))
    num_answers = num_calls(cluster, "half")
    assert num_answers == num_calls(cluster, "other") > 0, "no request mixes two revisions"
    for _ in range(4):
        await stub.Embed(embed)
    num_embeddings = num_calls(cluster, "half", "other") - 2 * num_answers
    assert num_embeddings in (0, 4), "one revision computes all embeddings"
    for name in ("old-p", "old-d"):
        await cluster[name].server.stop()
    await until(lambda: len(workers.all()) == 2)
    await stream(stub)
    await stub.Embed(embed)


@pytest.mark.parametrize("follows", [NEXT, {}], ids=["other arithmetic", "other weights"])
async def test_an_answer_that_has_begun_goes_on_with_its_weights_or_fails(
    cluster: Any, follows: dict[str, bytes]
) -> None:
    first = await cluster.add("first", "decode", pause_before_token=3, **NEW)
    second = await cluster.add("second", "decode", is_draining=True, **follows)
    stub = await cluster.start(worker_wait_seconds=0.2)
    await asyncio.wait_for(cluster.running.has_served.wait(), LIMIT_SECONDS)
    responses = aiter(stub.GenerateStream(pb.GenerateStreamRequest(generation=generation())))
    messages = [await anext(responses)]
    await asyncio.wait_for(first.paused.wait(), LIMIT_SECONDS)
    await second.serve_again()
    await until(lambda: len(cluster.running.workers.serving("decode")) == 2)
    await first.server.stop()
    if follows:
        messages += [each async for each in responses]
        assert ids_of(messages) == cluster.script.answer
        assert len(second.calls) == 1
        return
    error = from_rpc_error(await error_of(responses))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_DECODE_WORKER")
    assert "other weights" in error.message
    assert second.calls == []
    assert ids_of(await stream(stub)) == cluster.script.answer, "new requests go on"
