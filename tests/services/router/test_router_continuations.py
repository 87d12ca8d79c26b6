"""A router continues answers that its client has partly received from another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.services.router.outputs.dividing_decoder import joined
from quire.tokenization.tokenizer import Tokenizer
from tests.testing.rpc_errors import error_of
from tests.testing.thinking_model import copy_with_thinking

TEXT = "hello world, stop here"


async def responses(stub: Any, generation: pb.Generation) -> list[pb.GenerateStreamResponse]:
    return [each async for each in stub.GenerateStream(pb.GenerateStreamRequest(generation=generation))]


def asked(**stopping: Any) -> pb.Generation:
    generation = pb.Generation(text="hello", sampling=pb.SamplingParams(seed=7))
    generation.stopping.MergeFrom(pb.StoppingParams(**stopping))
    return generation


def continued(
    generation: pb.Generation, before: list[pb.GenerateStreamResponse], origin: str
) -> pb.Generation:
    """Return the request for the rest after some messages of the only answer."""
    result = pb.Generation()
    result.CopyFrom(generation)
    result.origin = origin
    result.received.add(
        token_ids=[token for each in before for token in each.token_ids],
        num_characters=sum(len(each.text) for each in before),
    )
    return result


def text_and_tokens(messages: list[pb.GenerateStreamResponse]) -> tuple[str, list[int], list[int]]:
    return (
        "".join(each.text for each in messages),
        [token for each in messages for token in each.token_ids],
        [each.finish_reason for each in messages if each.finish_reason],
    )


@pytest.mark.parametrize(
    "stopping",
    [{}, {"stop_strings": ["stop"]}, {"stop_strings": ["d, s"], "min_tokens": 2}, {"max_tokens": 5}],
    ids=["end", "stop", "stop within", "length"],
)
async def test_every_rest_completes_the_answer(stub: Any, stopping: dict[str, Any]) -> None:
    generation = asked(**stopping)
    whole = await responses(stub, generation)
    assert whole[0].origin
    for cut in range(1, len(whole)):
        rest = await responses(stub, continued(generation, whole[:cut], whole[0].origin))
        assert text_and_tokens(whole[:cut] + rest) == text_and_tokens(whole)
        assert rest[-1].usage.completion_tokens == whole[-1].usage.completion_tokens
        assert rest[-1].usage.prompt_tokens == whole[-1].usage.prompt_tokens


async def test_text_that_one_router_held_back_or_sent_ahead_is_sent_once(stub: Any) -> None:
    generation = asked()
    whole = await responses(stub, generation)
    text, tokens, _ = text_and_tokens(whole)
    for num_characters in range(len(text)):
        request = continued(generation, whole[:3], whole[0].origin)
        request.received[0].num_characters = num_characters
        assert text_and_tokens(await responses(stub, request))[:2] == (text[num_characters:], tokens[3:])


async def test_an_answer_whose_end_was_lost_ends_without_a_worker(pair: Any, stub: Any) -> None:
    generation = asked(max_tokens=4)
    whole = await responses(stub, generation)
    num_calls = len(pair.calls())
    request = continued(generation, whole, whole[0].origin)
    (rest,) = await responses(stub, request)
    assert (rest.finish_reason, rest.text, list(rest.token_ids)) == (pb.FINISH_REASON_LENGTH, "", [])
    assert rest.usage.completion_tokens == 4
    assert len(pair.calls()) == num_calls


async def test_several_answers_continue_one_by_one(pair: Any, stub: Any) -> None:
    generation = asked()
    generation.sampling.n = 3
    whole = await responses(stub, generation)
    token_ids = {i: [t for each in whole if each.index == i for t in each.token_ids] for i in range(3)}
    request = pb.Generation()
    request.CopyFrom(generation)
    request.origin = whole[0].origin
    request.received.add(index=0, token_ids=token_ids[0], is_finished=True)
    request.received.add(index=2, token_ids=token_ids[2][:2], num_characters=0)
    for worker in pair.workers.values():
        worker.calls.clear()
    rest = await responses(stub, request)
    found = {i: [t for each in rest if each.index == i for t in each.token_ids] for i in range(3)}
    assert (found[0], found[1], found[2]) == ([], token_ids[1], token_ids[2][2:])
    assert rest[-1].usage.completion_tokens == sum(map(len, token_ids.values()))
    calls = [call.sequence for call in pair.calls()]
    # Answer i has the seed of a separate request.
    assert {(call.sampling.seed, call.num_output_tokens) for call in calls} == {(8, 0), (9, 2)}


async def test_a_call_continues_where_it_broke(
    cluster: Any, model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    written = '<think>\nsay\n</think>\n\nso <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    cluster.script.answer[:] = [*await tokenizer.encode(written, add_special_tokens=False), 1]
    for role in ("prefill", "decode"):
        await cluster.add(role, role, max_model_len=512)
    stub = await cluster.start(model=str(copy_with_thinking(model_folder, tmp_path / "thinking")))
    generation = pb.Generation(sampling=pb.SamplingParams(seed=7))
    generation.response.parse = generation.response.prompt_token_ids = True
    generation.chat.messages.add(role="user", content="x")
    generation.chat.tools = '[{"name": "f"}]'
    whole = await responses(stub, generation)
    pieces = joined(piece for each in whole for piece in each.pieces)
    assert [call.name for call in (each.tool_call for each in pieces) if call.name] == ["f"]
    assert whole[-1].finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert whole[-1].usage.reasoning_tokens > 0
    # An answer of many messages would take as many requests: some cuts, of which most are within the call.
    for cut in {1, *range(2, len(whole), max(1, len(whole) // 8)), len(whole) - 1}:
        request = continued(generation, whole[:cut], whole[0].origin)
        request.chat.rendered.ids.extend(whole[0].prompt_token_ids)
        rest = await responses(stub, request)
        assert joined(piece for each in whole[:cut] + rest for piece in each.pieces) == pieces
        assert text_and_tokens(whole[:cut] + rest) == text_and_tokens(whole)
        assert rest[-1].finish_reason == whole[-1].finish_reason
        assert rest[-1].usage.reasoning_tokens == whole[-1].usage.reasoning_tokens


def received(**fields: Any) -> pb.ReceivedAnswer:
    return pb.ReceivedAnswer(**{"token_ids": [3], "num_characters": 0, **fields})


def too_long(generation: pb.Generation) -> None:
    generation.stopping.max_tokens = 1
    generation.received[0].token_ids.append(3)


BAD: dict[str, tuple[Callable[[pb.Generation], object], str]] = {
    "beam": (lambda g: g.sampling.beam.MergeFrom(pb.BeamParams(width=2)), "sampling.beam"),
    "best_of": (lambda g: g.sampling.MergeFrom(pb.SamplingParams(best_of=2)), "sampling.best_of"),
    "budget": (
        lambda g: g.sampling.MergeFrom(pb.SamplingParams(kv_budget_tokens=48)),
        "sampling.kv_budget_tokens",
    ),
    "seed": (lambda g: g.sampling.ClearField("seed"), "sampling.seed"),
    "twice": (lambda g: g.received.append(received()), "received"),
    "index": (lambda g: g.received[0].MergeFrom(pb.ReceivedAnswer(index=1)), "received"),
    "finished": (lambda g: g.received[0].MergeFrom(pb.ReceivedAnswer(is_finished=True)), "received"),
    "token": (lambda g: g.received[0].token_ids.append(10**6), "received[0].token_ids[1]"),
    "length": (too_long, "received[0].token_ids"),
}


@pytest.mark.parametrize("case", BAD)
async def test_answers_that_cannot_continue_are_refused_by_name(stub: Any, case: str) -> None:
    change, field = BAD[case]
    whole = await responses(stub, asked())
    request = asked()
    request.origin = whole[0].origin
    request.received.append(received())
    change(request)
    error = from_rpc_error(await error_of(responses(stub, request)))
    assert (error.code, error.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_an_answer_that_has_met_its_stop_string_is_refused(stub: Any) -> None:
    whole = await responses(stub, asked())
    request = continued(asked(stop_strings=["world"]), whole[:-1], whole[0].origin)
    await error_of(responses(stub, request), text="stop string")


async def test_another_model_does_not_continue_an_answer(stub: Any) -> None:
    whole = await responses(stub, asked())
    caught = await error_of(responses(stub, continued(asked(), whole[:2], "other")))
    assert from_rpc_error(caught).reason == "OTHER_ORIGIN"


async def test_only_a_stream_continues(stub: Any) -> None:
    request = continued(asked(), [], "")
    caught = await error_of(stub.Generate(pb.GenerateRequest(generation=request)))
    assert from_rpc_error(caught).metadata["field"] == "received"
