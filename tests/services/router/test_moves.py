"""Answers on a worker that drains: where they go on, and which of them stay."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
from quire.services.router.migration import copies
from tests.testing.fake_worker import PROMPT, ids_of
from tests.testing.until import until

SECONDS = 10.0


def ask(stub: Any, **sampling: Any) -> asyncio.Task[list[pb.GenerateStreamResponse]]:
    """Start a request and read its whole answer in a task."""
    request = pb.GenerateStreamRequest(
        generation=pb.Generation(text=PROMPT, sampling=pb.SamplingParams(**sampling), request_id="test")
    )

    async def read() -> list[pb.GenerateStreamResponse]:
        return [response async for response in stub.GenerateStream(request, timeout=SECONDS)]

    return asyncio.create_task(read())


async def drain(cluster: Any, worker_id: str, *, is_draining: bool = True) -> None:
    """Let the router know that a worker drains, or no longer does."""
    workers = cluster.running.workers
    (worker,) = (each for each in workers.all() if each.worker_id == worker_id)

    async def tell() -> None:
        cluster[worker_id].is_draining = is_draining

    await workers.set_draining(worker, is_draining, tell)


async def start(
    cluster: Any, *, pause_before_token: int = 2, **options: Any
) -> asyncio.Task[list[pb.GenerateStreamResponse]]:
    """Start an answer on ``d1``, where it pauses before a token; ``d2`` takes requests from then on."""
    await cluster.add("d1", "decode", pause_before_token=pause_before_token)
    await cluster.add("d2", "decode")
    stub = await cluster.start()
    await drain(cluster, "d2")
    answer = ask(stub, **options)
    await asyncio.wait_for(cluster["d1"].paused.wait(), SECONDS)
    await drain(cluster, "d2", is_draining=False)
    return answer


async def test_an_answer_continues_elsewhere_without_a_failure(cluster: Any) -> None:
    answer = await start(cluster)
    await drain(cluster, "d1")
    responses = await asyncio.wait_for(answer, SECONDS)
    script = cluster.script.answer
    assert ids_of(responses) == script
    assert responses[-1].usage.retries == 0
    (copy,) = cluster["d2"].copies
    prompt = list(cluster["d1"].calls[0].sequence.token_ids)
    num_copied = len(copy.token_ids) - len(prompt)
    assert num_copied in range(3)
    assert list(copy.token_ids) == [*prompt, *script[:num_copied]]
    assert copy.time == worker_pb2.COPY_TIME_NOW
    assert copy.pull_from.address == cluster["d1"].server.address
    assert copy.pull_from.num_blocks == (len(copy.token_ids) - 1) // 4
    (moved,) = cluster["d2"].calls
    num_sent = moved.sequence.num_output_tokens
    assert num_sent in range(num_copied, 3)
    assert (list(moved.sequence.token_ids), moved.sequence.attempt) == ([*prompt, *script[:num_sent]], 1)
    assert not moved.remote_prefill
    assert moved.sequence.sampling.seed == cluster["d1"].calls[0].sequence.sampling.seed
    await asyncio.wait_for(cluster["d1"].aborted.wait(), SECONDS)
    assert cluster.metric("quire_moves_total", result="moved") == 1
    assert cluster.metric("quire_retries_total", role="decode", cause="unavailable") == 0


async def test_blocks_filled_during_a_copy_are_copied_too(cluster: Any) -> None:
    answer = await start(cluster)
    cluster["d2"].pulled = worker_pb2.PullSummary(num_blocks=1)
    await drain(cluster, "d1")
    await asyncio.wait_for(answer, SECONDS)
    assert len(cluster["d2"].copies) == copies.MAX_COPIES


async def test_several_answers_continue_one_by_one(cluster: Any) -> None:
    answer = await start(cluster, n=2, temperature=1.0, seed=5)
    await drain(cluster, "d1")
    responses = await asyncio.wait_for(answer, SECONDS)
    assert [ids_of(responses, index) for index in range(2)] == [cluster.script.answer] * 2
    assert [call.sequence.sampling.seed for call in cluster["d2"].calls] == [5, 6]
    assert responses[-1].usage.retries == 0


async def test_a_prompt_that_waits_begins_elsewhere(cluster: Any) -> None:
    answer = await start(cluster, pause_before_token=0)
    cluster["d2"].pulled = worker_pb2.PullSummary(failure="evicted")
    await drain(cluster, "d1")
    assert ids_of(await asyncio.wait_for(answer, SECONDS)) == cluster.script.answer
    assert len(cluster["d2"].calls) == 1


async def test_an_answer_stays_if_much_would_be_computed_again(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MAX_MISSING_BLOCKS", 0)
    answer = await start(cluster)
    cluster["d2"].pulled = worker_pb2.PullSummary(failure="no_blocks")
    await drain(cluster, "d1")
    await until(lambda: cluster.metric("quire_moves_total", result="stayed") == 1)
    cluster["d1"].goes_on.set()
    assert ids_of(await asyncio.wait_for(answer, SECONDS)) == cluster.script.answer
    assert cluster["d2"].calls == []


async def test_a_worker_that_is_taken_back_keeps_its_answers(cluster: Any) -> None:
    answer = await start(cluster)
    cluster["d2"].may_copy.clear()
    await drain(cluster, "d1")
    await until(lambda: bool(cluster["d2"].copies))
    await drain(cluster, "d1", is_draining=False)
    cluster["d2"].may_copy.set()
    cluster["d1"].goes_on.set()
    assert ids_of(await asyncio.wait_for(answer, SECONDS)) == cluster.script.answer
    assert cluster["d2"].calls == []
    assert cluster.metric("quire_moves_total", result="moved") == 0


async def test_an_answer_waits_for_another_worker(cluster: Any) -> None:
    answer = await start(cluster)
    await drain(cluster, "d2")
    await drain(cluster, "d1")
    assert cluster["d2"].copies == []
    await drain(cluster, "d2", is_draining=False)
    assert ids_of(await asyncio.wait_for(answer, SECONDS)) == cluster.script.answer
    assert len(cluster["d2"].calls) == 1


@pytest.mark.parametrize("is_draining", [False, True])
def test_an_attempt_that_begins_on_a_draining_worker_moves(*, is_draining: bool) -> None:
    """The worker was chosen before the router knew that it drains."""
    spawn = Mock(side_effect=lambda coroutine: coroutine.close())
    worker = Mock(health=Mock(is_draining=is_draining))
    group = Mock(is_beam_search=False, params=SamplingParams(), num_tokens=0)
    known = copies.Copies(Mock(), spawn, copies.CopyMetrics(CollectorRegistry()), copies_grown=False)
    with known.follow(Mock(decode=worker, group=group)):
        assert spawn.called == is_draining


async def test_a_beam_search_stays(cluster: Any) -> None:
    answer = await start(cluster, pause_before_token=0, beam=pb.BeamParams(width=3))
    await drain(cluster, "d1")
    cluster["d1"].goes_on.set()
    await asyncio.wait_for(answer, SECONDS)
    assert cluster["d2"].calls == cluster["d2"].copies == []
