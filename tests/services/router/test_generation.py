"""Requests through a real router and scripted workers: hand-over, failures, the end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import pytest

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.routing.placement import PolicyConfig
from quire.rpc.errors import Aborted, Internal, InvalidArgument, ServiceError, Unavailable
from quire.services.server.phases import Phase
from tests.testing.fake_worker import PROMPT, generation, ids_of, stream, text_of
from tests.testing.rpc_errors import error_of

TEXT = "hello world, stop here"


def callers(cluster: Any, role: str) -> list[Any]:
    return [w for w in cluster.workers.values() if w.role == role and w.calls]


async def first_choice(cluster: Any, stub: Any, role: str) -> Any:
    """Return the worker that the affinity of the test's prompt prefers."""
    await stub.Generate(pb.GenerateRequest(generation=generation()), timeout=10)
    (chosen,) = callers(cluster, role)
    return chosen


async def test_one_prefill_one_decode(pair: Any, stub: Any) -> None:
    responses = await stream(stub)
    assert text_of(responses) == TEXT
    assert ids_of(responses) == pair.script.answer
    assert [r.request_id for r in responses] == ["test"] + [""] * (len(responses) - 1)
    assert [bool(r.finish_reason) for r in responses] == [False] * (len(responses) - 1) + [True]
    last = responses[-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP
    usage = last.usage
    assert (usage.completion_tokens, usage.retries) == (len(pair.script.answer), 0)
    assert (usage.blocks_shipped, usage.bytes_shipped, usage.blocks_reused_on_decode) == (3, 300, 1)
    (prefill,), (decode,) = callers(pair, "prefill"), callers(pair, "decode")
    assert decode.calls[0].remote_prefill
    assert prefill.calls[0].ticket.ticket_id == f"{decode.worker_id}-1"
    assert prefill.calls[0].sequence == decode.calls[0].sequence
    assert prefill.ended.is_set()
    assert decode.ended.is_set()
    assert not prefill.aborted.is_set()
    assert not decode.aborted.is_set()
    assert pair.metric("quire_request_success_total", finished_reason="stop") == 1
    assert pair.metric("quire_generation_tokens_total") == len(pair.script.answer)


async def test_the_unary_call_collects_the_stream(pair: Any, stub: Any) -> None:
    request = generation()
    request.response.logprobs = 0
    whole = await stub.Generate(pb.GenerateRequest(generation=request), timeout=10)
    (choice,) = whole.choices
    assert choice.text == TEXT
    assert list(choice.token_ids) == pair.script.answer
    assert [entry.logprob for entry in choice.logprobs] == [-float(i) for i in range(len(pair.script.answer))]
    assert whole.request_id == "test"
    assert whole.usage.prompt_tokens == len((await stub.Tokenize(pb.TokenizeRequest(text=PROMPT))).token_ids)


async def test_the_first_token_is_sent_before_the_push_has_ended(cluster: Any) -> None:
    await cluster.add("p", "prefill", pause_before_token=1)
    await cluster.add("d", "decode")
    stub = await cluster.start()
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=generation()), timeout=10)
    first = await call.read()
    assert list(first.token_ids) == cluster.script.answer[:1]
    call.cancel()


async def test_a_first_token_that_ends_the_sequence(pair: Any, stub: Any) -> None:
    responses = await stream(stub, max_tokens=1)
    assert ids_of(responses) == pair.script.answer[:1]
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    (decode,) = callers(pair, "decode")
    await asyncio.wait_for(decode.aborted.wait(), 5)
    await asyncio.wait_for(decode.ended.wait(), 5)


async def test_an_error_about_missing_blocks_can_overtake_the_only_token(cluster: Any) -> None:
    decode = await cluster.add("d", "decode", is_left_without_blocks=True)
    await cluster.add("p", "prefill", begins_after=decode.ended)
    responses = await stream(await cluster.start(), max_tokens=1)
    assert ids_of(responses) == cluster.script.answer[:1]
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert responses[-1].usage.retries == 0


async def test_a_dead_prefill_worker_is_blamed_for_the_missing_blocks(
    pair: Any, stub: Any, fault: Any
) -> None:
    decode = await first_choice(pair, stub, "decode")
    (prefill,) = callers(pair, "prefill")
    # It dies after the first token, and the decode worker is the first to say so.
    prefill.fault = fault(1, Unavailable("killed"))
    decode.is_left_without_blocks = True
    responses = await stream(stub)
    assert ids_of(responses) == pair.script.answer
    assert pair.metric("quire_retries_total", role="prefill", cause="unavailable") == 1
    assert pair.metric("quire_retries_total", role="decode", cause="aborted") == 0
    assert pair.running is not None
    unhealthy = [w.worker_id for w in pair.running.workers.all() if w.health.is_unhealthy]
    assert unhealthy == [prefill.worker_id]
    assert callers(pair, "decode") == [decode]


async def test_a_stop_string_over_token_borders_cancels_decode(pair: Any, stub: Any) -> None:
    # else the answer may be over before the router has read the stop string
    pair.change("decode", pause_before_token=len(pair.script.answer) - 2)
    responses = await stream(stub, stop_strings=["ld, st"])
    assert text_of(responses) == "hello wor"
    assert responses[-1].finish_reason == pb.FINISH_REASON_STOP
    assert len(ids_of(responses)) < len(pair.script.answer)
    (decode,) = callers(pair, "decode")
    await asyncio.wait_for(decode.aborted.wait(), 5)
    await asyncio.wait_for(decode.ended.wait(), 5)


async def test_a_stop_string_does_not_count_before_min_tokens(pair: Any) -> None:
    responses = await stream(await pair.start(), stop_strings=["h"], min_tokens=3)
    assert text_of(responses) == "hello world, stop "


async def test_decode_workers_serve_without_prefill_workers(cluster: Any) -> None:
    await cluster.add("d", "decode", num_cached_tokens=4)
    responses = await stream(await cluster.start())
    assert text_of(responses) == TEXT
    assert not cluster["d"].calls[0].remote_prefill
    assert responses[-1].usage.cached_prompt_tokens == 4
    assert responses[-1].usage.blocks_reused_on_decode == 1
    assert responses[-1].usage.blocks_shipped == 0


async def test_short_uncached_prompts_are_prefilled_by_decode(pair: Any) -> None:
    responses = await stream(await pair.start(placing=PolicyConfig(local_prefill_tokens=60)))
    assert text_of(responses) == TEXT
    assert not callers(pair, "prefill")


@pytest.mark.parametrize("error", [Aborted("x"), Unavailable("x"), Internal("x")])
@pytest.mark.parametrize("before_token", [0, 1])
async def test_a_lost_prefill_is_retried_on_another(
    pair: Any, stub: Any, fault: Any, error: Any, before_token: int
) -> None:
    pair.change("prefill", fault=fault(before_token, error))
    responses = await stream(stub)
    assert text_of(responses) == TEXT
    assert ids_of(responses) == pair.script.answer
    # Both prefill workers fail: in the third attempt, the decode worker computes the prompt too.
    assert responses[-1].usage.retries == 2
    attempts = [call.sequence for call in pair.calls("prefill")]
    assert sorted(sequence.attempt for sequence in attempts) == [0, 1]
    assert {sequence.num_output_tokens for sequence in attempts} == ({0} if before_token == 0 else {0, 1})
    assert len({sequence.sampling.seed for sequence in attempts}) == 1
    assert len(pair["p1"].calls) == len(pair["p2"].calls) == 1
    (third,) = [c for d in callers(pair, "decode") for c in d.calls if not c.remote_prefill]
    assert third.sequence.num_output_tokens == 2 * before_token
    cause = error.code.name.lower()
    assert pair.metric("quire_retries_total", role="prefill", cause=cause) == 2
    assert pair.metric("quire_retries_total", role="decode", cause=cause) == 0
    # Each attempt looks up and chooses again.
    assert pair.metric("quire_request_phase_seconds_count", phase=Phase.LOOKUP) == 3


async def test_a_lost_decode_continues_elsewhere_without_repetition(pair: Any, stub: Any, fault: Any) -> None:
    chosen = await first_choice(pair, stub, "decode")
    chosen.fault = fault(3, Unavailable("killed"))
    responses = await stream(stub)
    assert text_of(responses) == TEXT
    assert ids_of(responses) == pair.script.answer
    assert responses[-1].usage.retries == 1
    # The prefill worker's account of the lost attempt may come before the loss or too late to be counted.
    assert responses[-1].usage.blocks_shipped in (3, 6)
    (other,) = [w for w in callers(pair, "decode") if w is not chosen]
    sequence = other.calls[0].sequence
    prompt = (await stub.Tokenize(pb.TokenizeRequest(text=PROMPT))).token_ids
    # The calls and the stream of outputs are not ordered: the loss may overtake any of the tokens.
    assert sequence.num_output_tokens in range(5)
    assert list(sequence.token_ids) == [*prompt, *pair.script.answer[: sequence.num_output_tokens]]
    assert sequence.attempt == 1
    assert sequence.stopping.max_tokens == 64 - len(prompt)


async def test_a_decode_lost_after_its_last_token_is_no_loss(cluster: Any, fault: Any) -> None:
    worker = await cluster.add("d", "decode")
    cluster.script.answer[-1] = 5
    stub = await cluster.start()
    worker.script.finish_reason = lambda sequence, position: pb.FINISH_REASON_UNSPECIFIED
    worker.fault = fault(3)
    responses = await stream(stub, max_tokens=3)
    assert ids_of(responses) == cluster.script.answer[:3]
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert len(worker.calls) == 1


async def test_retries_are_bounded(cluster: Any) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start()

    async def fail(count: int) -> None:
        if count == 1:
            raise Aborted("always")

    worker._before_token = fail
    caught = await error_of(stream(stub), grpc.StatusCode.UNAVAILABLE)
    assert len(worker.calls) == 4
    assert "3 retries" in str(caught.details())


@pytest.mark.parametrize("before_token", [0, 1])
async def test_a_disconnect_aborts_both_calls(cluster: Any, before_token: int) -> None:
    prefill = await cluster.add("p", "prefill", pause_before_token=before_token)
    decode = await cluster.add("d", "decode")
    stub = await cluster.start()
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=generation()), timeout=10)
    reading = asyncio.ensure_future(call.read())
    await asyncio.wait_for(prefill.paused.wait(), 5)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    for worker in (prefill, decode):
        await asyncio.wait_for(worker.aborted.wait(), 5)
        await asyncio.wait_for(worker.ended.wait(), 5)
    assert cluster.running.workers.live("decode")[0].num_requests == 0
    assert cluster.running.workers.live("decode")[0].resident_tokens == 0
    assert cluster.metric("quire_router_requests_running") == 0


async def test_the_deadline_reaches_the_workers(cluster: Any) -> None:
    worker = await cluster.add("d", "decode", pause_before_token=1)
    stub = await cluster.start(request_timeout_seconds=0.3)
    await error_of(stream(stub), grpc.StatusCode.DEADLINE_EXCEEDED, "after 1 tokens")
    await asyncio.wait_for(worker.ended.wait(), 5)


async def test_no_worker_has_joined(cluster: Any) -> None:
    stub = await cluster.start()
    error = from_rpc_error(await error_of(stream(stub)))
    assert "no worker has joined yet" in error.message
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
    assert error.retry_after is not None


async def test_a_prompt_that_a_worker_refuses_is_named_as_the_client_sent_it(pair: Any, fault: Any) -> None:
    pair.change(fault=fault(0, InvalidArgument("token_ids", "needs more blocks than there are")))
    caught = await error_of(stream(await pair.start()))
    assert caught.details() == "text: needs more blocks than there are"


@pytest.mark.parametrize(
    ("error", "levels"), [(InvalidArgument("format.regex", "is bad"), []), (Internal("lost"), ["WARNING"])]
)
async def test_a_clients_mistake_that_a_worker_finds_is_no_warning(
    cluster: Any, fault: Any, caplog: pytest.LogCaptureFixture, error: ServiceError, levels: list[str]
) -> None:
    worker = await cluster.add("d", "decode")
    worker.fault = fault(0, error)
    stub = await cluster.start()
    with caplog.at_level("INFO"), suppress(grpc.aio.AioRpcError):
        await stream(stub)
    assert worker.fault is None
    records = [record for record in caplog.records if record.getMessage() == "attempt_failed"]
    assert [record.levelname for record in records] == levels


async def test_model_info_tokenize_and_detokenize(pair: Any) -> None:
    stub = await pair.start(served_model_name="mine")
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.max_model_len, info.block_size) == ("mine", 64, 4)
    assert (info.num_prefill_workers, info.num_decode_workers) == (2, 2)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=" hello ")])
    ids = (await stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == "<|user|>hello\n<|assistant|>"


async def test_a_request_that_would_be_late_is_refused_at_once(pair: Any, stub: Any) -> None:
    for worker in pair.running.workers.all():
        worker.pending_tokens = 500_000
    refused = await error_of(stub.Generate(pb.GenerateRequest(generation=generation()), timeout=10))
    error = from_rpc_error(refused)
    assert error.reason == "TOO_LATE"
    assert error.retry_after == pytest.approx(40, abs=2)
    assert not pair.calls()
    assert pair.metric("quire_admission_rejections_total", reason="too_late") == 1
    for worker in pair.running.workers.all():
        worker.pending_tokens = 0
    assert text_of(await stream(stub)) == TEXT
