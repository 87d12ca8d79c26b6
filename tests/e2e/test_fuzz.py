"""Every method of every service takes anything: it answers, refuses or is out of time, and keeps nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from quire.protos import admin_pb2, inference_pb2, kvtransfer_pb2, worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.services.local.stack import RunningStack
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle

CALL_SECONDS = 0.3
PATIENCE_SECONDS = 20.0
"""A call that lasts longer than its deadline by this much hangs."""

# Names of fields whose random values would only ever meet the same first check.
_WORDS = ("prefill-0", "decode-0", "0", "user", "system", "llama", "hello", "a\nb", "\x1b[31m", "{{ 7 * 7 }}")
# No message by itself can make these succeed: they need a ticket, a lease, a worker, an adapter or a level.
_REFUSALS = {
    "Push": (grpc.StatusCode.NOT_FOUND,),
    "Pull": (grpc.StatusCode.NOT_FOUND,),
    "Renew": (grpc.StatusCode.NOT_FOUND,),
    **dict.fromkeys(("AddAdapter", "LoadAdapter"), (grpc.StatusCode.FAILED_PRECONDITION,)),
    **dict.fromkeys(("RemoveAdapter", "UnloadAdapter"), (grpc.StatusCode.NOT_FOUND,)),
    "DrainWorker": (grpc.StatusCode.NOT_FOUND,),
    "ChangeWorkerRole": (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT),
    "ScaleWorkers": (grpc.StatusCode.FAILED_PRECONDITION,),
    "SetRole": (grpc.StatusCode.INVALID_ARGUMENT,),
    # The call before may still be ending.
    "StreamOutputs": (grpc.StatusCode.ALREADY_EXISTS,),
    "SetLogLevel": (grpc.StatusCode.INVALID_ARGUMENT,),
    "ChangeLogLevel": (grpc.StatusCode.INVALID_ARGUMENT,),
    "Tokenize": (grpc.StatusCode.INVALID_ARGUMENT,),
    # The router's own, for a model without embeddings; and the gateway's.
    "Embed": (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED),
    **dict.fromkeys(("StartProfile", "StopProfile"), (grpc.StatusCode.UNIMPLEMENTED,)),
}
_ENDLESS = ("SubscribeKvEvents", "StreamOutputs", "WatchWorker")
"""Streams that end with their caller: one message is enough."""
# What the client's own library says when a call ended while it was still writing; the server did not.
_WRITE_FAILED = "Internal error from Core"
OPEN_STREAM = "open"
_SEARCH = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
_DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Return values of a scalar field, the likely and the extreme ones."""
    integers = [0, 1, 2, 3, 16, 255, 320, 2**31 - 1]
    match field.type:
        case FieldDescriptor.TYPE_UINT32 | FieldDescriptor.TYPE_FIXED32:
            return st.sampled_from([*integers, 2**32 - 1]) | st.integers(0, 300)
        case FieldDescriptor.TYPE_INT32 | FieldDescriptor.TYPE_SINT32 | FieldDescriptor.TYPE_INT64:
            return st.sampled_from([*integers, -1, -(2**31)]) | st.integers(0, 300)
        case FieldDescriptor.TYPE_UINT64 | FieldDescriptor.TYPE_FIXED64:
            return st.sampled_from([*integers, 2**64 - 1])
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return st.sampled_from([0.0, 1.0, 0.5, -1.0, 1e30, float("nan"), float("inf"), float("-inf")])
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_STRING:
            return st.sampled_from(_WORDS) | st.text(max_size=20)
        case FieldDescriptor.TYPE_BYTES:
            return st.binary(max_size=40)
        case FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            return st.integers(-1, len(field.enum_type.values) + 1)
    raise AssertionError(f"no values for {field.full_name}")


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, depth: int = 5) -> Message:
    """Build a message with some of its fields."""
    message: Message = GetMessageClass(kind)()
    for field in kind.fields:
        if not draw(st.integers(0, 3)):
            continue
        values: st.SearchStrategy[Any]
        if field.message_type is None:
            values = scalars(field)
        elif field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            if value.message_type is None:
                drawn = draw(st.dictionaries(scalars(key), scalars(value), max_size=3))
                getattr(message, field.name).update(drawn)
            elif depth:
                for drawn_key in draw(st.lists(scalars(key), max_size=3)):
                    content = draw(messages(value.message_type, depth - 1))
                    getattr(message, field.name)[drawn_key].CopyFrom(content)
            continue
        elif depth:
            values = messages(field.message_type, depth - 1)
        else:
            continue
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=5)))
        elif field.message_type is None:
            setattr(message, field.name, draw(values))
        else:
            getattr(message, field.name).CopyFrom(draw(values))
    return message


@st.composite
def variants(draw: st.DrawFn, valid: Message, depth: int = 5) -> Message:
    """Change some fields of a message that would be served, so that the rest of it gets far."""
    kind = valid.DESCRIPTOR
    assert isinstance(kind, Descriptor)
    changed = type(valid)()
    changed.CopyFrom(valid)
    for name, field in kind.fields_by_name.items():
        if draw(st.integers(0, 7)):
            if field.message_type and not field.is_repeated and valid.HasField(name) and depth:
                getattr(changed, name).CopyFrom(draw(variants(getattr(valid, name), depth - 1)))
            continue
        changed.ClearField(name)
        random = draw(messages(kind, depth))
        for other in kind.fields_by_name:
            if other != name:
                random.ClearField(other)
        changed.MergeFrom(random)
    return changed


def valid_requests(method: MethodDescriptor, info: worker_pb2.GetWorkerInfoResponse) -> list[Message]:
    """Return requests that a method serves, as far as it depends on their fields."""
    prompt = list(range(2, 40))
    sampling = inference_pb2.SamplingParams(temperature=1.0, top_p=0.9, top_k=5, min_p=0.01, seed=1)
    stopping = inference_pb2.StoppingParams(max_tokens=4, min_tokens=1)
    generation = inference_pb2.Generation(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling,
        stopping=stopping,
        response=inference_pb2.ResponseOptions(logprobs=2),
        request_id="fuzz",
        cache_salt="salt",
    )
    sequence = worker_pb2.Sequence(
        sequence_id="fuzz",
        token_ids=prompt,
        sampling=sampling,
        stopping=stopping,
        logprobs=2,
        cache_scope=worker_pb2.CacheScope(tenant="acme", salt="salt"),
    )
    opening = kvtransfer_pb2.PushOpen(receiver_epoch=info.epoch, layout=info.layout, num_blocks=3)
    frames = kvtransfer_pb2.PushFrames(frames=[kvtransfer_pb2.BlockFrame(payload=b"block")])
    if method.containing_service.name == "VllmEngine":
        return [_gateway_request(method, prompt)]
    match method.name:
        case "Generate":
            return [inference_pb2.GenerateRequest(generation=generation)]
        case "GenerateStream":
            return [inference_pb2.GenerateStreamRequest(generation=generation)]
        case "GenerateBatch":
            return [inference_pb2.GenerateBatchRequest(generations=[generation] * 3)]
        case "Embed":
            return [inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="one")])]
        case "EndSession":
            return [inference_pb2.EndSessionRequest(session="fuzz")]
        case "Prefill":
            return [worker_pb2.PrefillRequest(sequence=sequence)]
        case "Decode":
            channel = worker_pb2.OutputChannel(stream_id=OPEN_STREAM)
            return [worker_pb2.DecodeRequest(sequence=sequence, output_channel=channel)]
        case "StreamOutputs":
            return [worker_pb2.StreamOutputsRequest(stream_id="fuzz")]
        case "Pin":
            pin = kvtransfer_pb2.PinRequest(
                holder_epoch=info.epoch, layout=info.layout, block_hashes=[b"0" * 16]
            )
            return [pin]
        case "AddAdapter":
            return [admin_pb2.AddAdapterRequest(name="fuzz", path="/no/adapter")]
        case "LoadAdapter":
            return [worker_pb2.LoadAdapterRequest(name="fuzz", path="/no/adapter")]
        case "Push":
            commit = kvtransfer_pb2.PushCommit(first_token_id=3)
            return [
                kvtransfer_pb2.PushRequest(open=opening),
                kvtransfer_pb2.PushRequest(frames=frames),
                kvtransfer_pb2.PushRequest(commit=commit),
            ]
    return [GetMessageClass(method.input_type)()]


def _gateway_request(method: MethodDescriptor, prompt: list[int]) -> Message:
    request: Message = GetMessageClass(method.input_type)()
    if method.name == "Generate":
        request = vllm.GenerateRequest(
            request_id="fuzz",
            tokenized=vllm.TokenizedInput(input_ids=prompt),
            sampling_params=vllm.SamplingParams(
                temperature=1.0, top_p=0.9, top_k=5, max_tokens=1, logprobs=2
            ),
            stream=True,
            kv_transfer_params_json='{"do_remote_decode": true}',
        )
    return request


def services() -> Iterator[tuple[str, MethodDescriptor]]:
    """Yield which process serves a method, and the method."""
    for process, file in (
        ("router", inference_pb2),
        ("admin", admin_pb2),
        ("prefill-0", worker_pb2),
        ("decode-0", worker_pb2),
        ("decode-0", kvtransfer_pb2),
        ("prefill-0", vllm),
        ("decode-0", vllm),
    ):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield process, method


CASES = list(services())
# A service decodes the bytes of all its methods alike.
ONE_OF_EACH = {
    (process, method.containing_service.name, method.client_streaming): (process, method)
    for process, method in CASES
}
IDS = [f"{process}-{method.containing_service.name}-{method.name}" for process, method in CASES]


@pytest.fixture(scope="module")
def stack(start_stack: StartStack) -> Iterator[RunningStack]:
    """Run one worker of each role, with the service for gateways beside its own."""
    with start_stack("llama", vllm_grpc=True) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def outputs(stack: RunningStack) -> Iterator[None]:
    """Keep the streams open that decodes name."""
    with ExitStack() as opened:
        for name, ready in stack.ready.items():
            channel: Any = opened.enter_context(grpc.insecure_channel(ready.address))
            request = worker_pb2.StreamOutputsRequest(stream_id=OPEN_STREAM)
            call: Any = WorkerServiceStub(stack.peer(name, channel)).StreamOutputs(request)
            opened.callback(call.cancel)
            next(call)
        yield


def address(stack: RunningStack, process: str) -> str:
    match process:
        case "router":
            return stack.address
        case "admin":
            return stack.admin_address
    return stack.ready[process].address


async def outcome(
    stack: RunningStack,
    process: str,
    method: MethodDescriptor,
    requests: list[bytes],
    seconds: float = CALL_SECONDS,
) -> grpc.StatusCode:
    """Return how a call with these requests ends; workers get their calls from a member of the cluster."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with grpc.aio.insecure_channel(address(stack, process)) as channel:
        callee = stack.peer(process, channel) if process in stack.ready else channel
        call = callee.stream_stream(path, request_serializer=None, response_deserializer=None)(
            iter(requests), timeout=seconds
        )
        async with asyncio.timeout(seconds + PATIENCE_SECONDS):
            try:
                async for _ in call:
                    if method.name in _ENDLESS:
                        return grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                if error.details() == _WRITE_FAILED:
                    return grpc.StatusCode.CANCELLED
                return error.code()
            return grpc.StatusCode.OK


@pytest.fixture(scope="module")
def info(stack: RunningStack) -> worker_pb2.GetWorkerInfoResponse:
    """Return what the decode worker says of itself."""
    with grpc.insecure_channel(stack.ready["decode-0"].address) as channel:
        told: worker_pb2.GetWorkerInfoResponse = WorkerServiceStub(channel).GetWorkerInfo(
            worker_pb2.GetWorkerInfoRequest()
        )
        return told


@pytest.mark.parametrize(("process", "method"), CASES, ids=IDS)
def test_slightly_wrong_messages_meet_no_defect(
    stack: RunningStack, info: worker_pb2.GetWorkerInfoResponse, process: str, method: MethodDescriptor
) -> None:
    valid = valid_requests(method, info)
    encoded_valid = [each.SerializeToString() for each in valid]
    unchanged = grpc.StatusCode.CANCELLED
    # gRPC's client loses the status if the server refuses a call whose messages are still being written.
    while unchanged is grpc.StatusCode.CANCELLED:
        unchanged = asyncio.run(outcome(stack, process, method, encoded_valid, PATIENCE_SECONDS))
    assert unchanged in (grpc.StatusCode.OK, *_REFUSALS.get(method.name, ())), "the pattern itself is refused"

    @_SEARCH
    @given(st.tuples(*map(variants, valid)))
    def call(requests: tuple[Message, ...]) -> None:
        encoded = [each.SerializeToString() for each in requests]
        code = asyncio.run(outcome(stack, process, method, encoded))
        assert code not in _DEFECTS, requests

    call()


@pytest.mark.parametrize(("process", "method"), CASES, ids=IDS)
def test_random_messages_meet_no_defect(stack: RunningStack, process: str, method: MethodDescriptor) -> None:
    @_SEARCH
    @given(st.lists(messages(method.input_type), min_size=1, max_size=3 if method.client_streaming else 1))
    def call(requests: list[Message]) -> None:
        code = asyncio.run(outcome(stack, process, method, [each.SerializeToString() for each in requests]))
        assert code not in _DEFECTS, requests

    call()


@pytest.mark.parametrize(("process", "method"), ONE_OF_EACH.values(), ids=map(str, ONE_OF_EACH))
def test_random_bytes_meet_no_defect(stack: RunningStack, process: str, method: MethodDescriptor) -> None:
    @settings(max_examples=10, phases=[Phase.generate])
    @given(st.lists(st.binary(max_size=200), max_size=3 if method.client_streaming else 1))
    def call(requests: list[bytes]) -> None:
        assert asyncio.run(outcome(stack, process, method, requests)) not in _DEFECTS

    call()


async def test_afterwards_nothing_is_held_and_answers_are_right(stack: RunningStack, expected: Any) -> None:
    async with connect(stack) as (client, workers):
        await wait_until_idle(workers)
        for worker in workers.values():
            await worker.SetDraining(worker_pb2.SetDrainingRequest(is_draining=False))
            await worker.ClearCache(worker_pb2.ClearCacheRequest())
            load = await worker.GetLoad(worker_pb2.GetLoadRequest())
            total = (await worker.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).num_blocks
            assert (load.free_blocks, load.num_running, load.num_waiting) == (total, 0, 0)
        prompt = make_prompt(100, seed=9)
        answer = await client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
        assert answer.token_ids == tuple(expected("llama", prompt)[:8])
