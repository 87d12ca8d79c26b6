"""Both ends of a request to a worker: calls it as a router does, and sends outputs as a worker does."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from quire.protos import inference_pb2, worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub

WAIT_SECONDS = 60.0
_names = count()


class Decode:
    """One decode on a worker, in a stream of its own.

    Attributes:
        accepted: the worker's first message, with what it has cached or pulled.
    """

    def __init__(self, accepted: worker_pb2.DecodeResponse, call: Any, stream: Any) -> None:
        self.accepted = accepted
        self._call = call
        self._stream = stream

    async def outputs(self) -> list[worker_pb2.SequenceOutput]:
        """Return the outputs of the only sequence, from the first to the last."""
        outputs: list[worker_pb2.SequenceOutput] = []
        while not (outputs and outputs[-1].finish_reason):
            message = await anext(self._stream)
            for token_id in message.token_ids:
                outputs.append(worker_pb2.SequenceOutput(tokens=[worker_pb2.SampledToken(token_id=token_id)]))
            outputs += [other.output for other in message.others]
        assert [response async for response in self._call] == []
        return outputs

    async def token_ids(self) -> list[int]:
        """Return all tokens of the only sequence."""
        return [token.token_id for output in await self.outputs() for token in output.tokens]


@asynccontextmanager
async def decoding(stub: WorkerServiceStub, request: worker_pb2.DecodeRequest) -> AsyncIterator[Decode]:
    """Open a stream of outputs and call a worker; yield when it has accepted the request."""
    request.output_channel.stream_id = secrets.token_hex(8)
    opening = worker_pb2.StreamOutputsRequest(stream_id=request.output_channel.stream_id)
    opened: Any = stub.StreamOutputs(opening, timeout=WAIT_SECONDS)
    stream = aiter(opened)
    await anext(stream)
    called: Any = stub.Decode(request, timeout=WAIT_SECONDS)
    call = aiter(called)
    try:
        yield Decode(await anext(call), call, stream)
    finally:
        called.cancel()
        opened.cancel()


def make_sequence(prompt: list[int], max_tokens: int = 64, **fields: Any) -> worker_pb2.Sequence:
    """Return a greedy request with a name of its own, as a router would send it; ``fields`` may differ."""
    values = {
        "sequence_id": f"sequence-{next(_names)}",
        "token_ids": prompt,
        "sampling": inference_pb2.SamplingParams(temperature=0.0, top_p=1.0),
        "stopping": inference_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    }
    return worker_pb2.Sequence(**{**values, **fields})


async def prefill(
    stub: WorkerServiceStub, sequence: worker_pb2.Sequence, **fields: Any
) -> worker_pb2.PrefillResponse:
    """Compute a prompt and leave its blocks in the worker's cache; return its only message."""
    call: Any = stub.Prefill(worker_pb2.PrefillRequest(sequence=sequence, **fields), timeout=WAIT_SECONDS)
    responses: list[worker_pb2.PrefillResponse] = [message async for message in call]
    assert len(responses) == 1
    return responses[0]


async def pull_source(stub: WorkerServiceStub, num_blocks: int, **fields: Any) -> worker_pb2.PullSource:
    """Return a worker as the source of a prompt's first blocks; ``fields`` may differ."""
    info: Any = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    values = {"address": info.address, "epoch": info.epoch, "num_blocks": num_blocks}
    return worker_pb2.PullSource(**{**values, **fields})


async def disaggregated(
    prefilling: WorkerServiceStub, decode: WorkerServiceStub, sequence: worker_pb2.Sequence
) -> tuple[list[worker_pb2.SampledToken], worker_pb2.PrefillResponse, worker_pb2.PushSummary]:
    """Let one worker compute a prompt and push its blocks to another, which decodes.

    Returns:
        The tokens of the answer, the first message of the prefill worker, and its summary of the push.
    """
    request = worker_pb2.DecodeRequest(sequence=sequence, remote_prefill=True)
    async with decoding(decode, request) as begun:
        accepted = begun.accepted.accepted
        pushing = worker_pb2.PrefillRequest(sequence=sequence, ticket=accepted.ticket)
        call: Any = prefilling.Prefill(pushing, timeout=WAIT_SECONDS)
        prefilled = [message async for message in call]
        outputs = await begun.outputs()
        tokens = [token for each in (*prefilled, *outputs) for token in each.tokens]
        return tokens, prefilled[0], prefilled[-1].pushed


class StreamingWorker(WorkerServiceServicer):
    """Opens streams of outputs, for scripted decodes."""

    def __init__(self) -> None:
        self.streams: dict[str, asyncio.Queue[worker_pb2.StreamOutputsResponse | None]] = {}
        """The open streams, by id; None ends one."""
        self.num_sent: Counter[str] = Counter()
        """Number of messages of each stream."""

    async def StreamOutputs(
        self, request: worker_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[worker_pb2.StreamOutputsResponse]:
        messages = self.streams[request.stream_id] = asyncio.Queue()
        self.num_sent[request.stream_id] = 1
        try:
            yield worker_pb2.StreamOutputsResponse()
            while (message := await messages.get()) is not None:
                self.num_sent[request.stream_id] += 1
                yield message
                messages.task_done()
        finally:
            del self.streams[request.stream_id]

    async def send(self, request: worker_pb2.DecodeRequest, *outputs: worker_pb2.SequenceOutput) -> None:
        """Send outputs of a decode in one message; return when gRPC has taken it."""
        channel = request.output_channel
        if (stream := self.streams.get(channel.stream_id)) is not None:
            others = [worker_pb2.ChannelOutput(channel=channel.channel, output=output) for output in outputs]
            stream.put_nowait(worker_pb2.StreamOutputsResponse(others=others))
            await stream.join()
