"""Scripted workers on real servers, a router in front of them, and requests to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import cos, sin
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.protos import kvtransfer_pb2, worker_pb2, worker_pb2_grpc
from quire.routing.placement import PolicyConfig
from quire.rpc.cluster_proof import RequireProof, description_proof
from quire.rpc.errors import Aborted, ServiceError
from quire.rpc.health import STOPPING
from quire.rpc.server import GrpcServer, Service, grpc_server
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from tests.testing.decodes import StreamingWorker

VOCAB_SIZE = 320
REPORT_SECONDS = 0.1
"""Pause between two reports of a worker: without them, it would be late, and others would be preferred."""
PROMPT = "say hello world, stop here"
"""Longer than a block, so that its workers are always the same."""


def generation(text: str = PROMPT, **stopping: Any) -> pb.Generation:
    return pb.Generation(text=text, stopping=pb.StoppingParams(**stopping), request_id="test")


async def stream(stub: Any, **stopping: Any) -> list[pb.GenerateStreamResponse]:
    request = pb.GenerateStreamRequest(generation=generation(**stopping))
    return [response async for response in stub.GenerateStream(request, timeout=60)]


def text_of(responses: list[pb.GenerateStreamResponse]) -> str:
    return "".join(response.text for response in responses)


def ids_of(responses: list[pb.GenerateStreamResponse], index: int = 0) -> list[int]:
    return [token_id for each in responses if each.index == index for token_id in each.token_ids]


@dataclass
class Fault:
    """Where a worker fails, once: before its n-th token of a call."""

    before_token: int
    error: ServiceError


@dataclass
class Script:
    """What the model says on every worker, and the hand-offs between the fake workers."""

    answer: list[int]
    commits: dict[str, asyncio.Event] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    """Of each token of an answer, for several answers; by default a token's position below zero."""
    second: list[int] = field(default_factory=list)
    """What the second of several answers is while they are computed together; by default ``answer``."""

    def finish_reason(self, sequence: worker_pb2.Sequence, position: int) -> pb.FinishReason:
        """Return the finish reason after the token at an output position."""
        if self.answer[position] == 1 and not sequence.stopping.ignore_eos:
            return pb.FINISH_REASON_STOP
        is_last = position + 1 >= min(sequence.stopping.max_tokens, len(self.answer))
        return pb.FINISH_REASON_LENGTH if is_last else pb.FINISH_REASON_UNSPECIFIED

    def beams(self, sequence: worker_pb2.Sequence) -> list[worker_pb2.SequenceOutput]:
        """Return a search's answers, one fewer than its beams: the script, each a token shorter."""
        return [
            worker_pb2.SequenceOutput(
                index=index,
                tokens=[self.token(position) for position in range(len(self.answer) - index)],
                finish_reason=pb.FINISH_REASON_STOP,
                score=-0.5 - index,
            )
            for index in range(sequence.sampling.beam.width - 1)
        ]

    def token(self, position: int, index: int = 0) -> worker_pb2.SampledToken:
        logprob = self.logprobs[index] if self.logprobs else -float(position)
        return worker_pb2.SampledToken(
            token_id=(self.second if index == 1 and self.second else self.answer)[position],
            logprobs=pb.TokenLogprobs(logprob=logprob),
        )


def embedding_of(token_ids: Sequence[int]) -> list[float]:
    """Return what the workers say is the embedding of a prompt: a vector of the length 1 in a plane."""
    angle = sum(token_ids) / 100
    return [cos(angle), sin(angle), 0.0, 0.0]


def num_sequences(sequence: worker_pb2.Sequence) -> int:
    """Return how many answers a request wants."""
    return sequence.sampling.beam.width or sequence.sampling.n or 1


class FakeWorker(StreamingWorker):
    """Says the script, keeps what it was asked, and fails or waits where it is told to."""

    def __init__(
        self, worker_id: str, role: str, script: Script, model_path: Path, num_received: Counter[str]
    ) -> None:
        super().__init__()
        self._num_received = num_received
        self.worker_id, self.role, self.script, self.model_path = worker_id, role, script, model_path
        self.epoch = "1"
        self.max_model_len = 64
        self.secret = b""
        self.cache_descriptor = b"tiny"
        self.described = worker_pb2.GetWorkerInfoResponse()
        """What its description has besides."""
        self.layout = kvtransfer_pb2.KvLayout(block_size=4, num_layers=1, dtype="float32")
        self.calls: list[Any] = []
        self.aborted = asyncio.Event()
        self.num_generated_tokens = 0
        """What it says of an aborted call; 0: that it has generated no token that it did not send."""
        self.num_cached_tokens = 0
        self.is_draining = False
        self.is_stalled = False
        self.is_quiet = False
        """Whether it reports only once, so that the router must find out by other means that it is alive."""
        self.load_of_others = worker_pb2.TotalLoad()
        self.answers_probes = asyncio.Event()
        self.answers_probes.set()
        self.embedding = worker_pb2.EmbeddingModel(size=4, pooling="lasttoken", normalizes=True)
        self.is_left_without_blocks = False
        self.begins_after: asyncio.Event | None = None
        self.fault: Fault | None = None
        self.pause_before_token: int | None = None
        self.paused = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.copies: list[worker_pb2.CopyBlocksRequest] = []
        self.forgotten: list[worker_pb2.ForgetBlocksRequest] = []
        self.pulled = worker_pb2.PullSummary(num_held_blocks=1000)
        """The result of each copy."""
        self.may_copy = asyncio.Event()
        self.may_copy.set()
        self.ended = asyncio.Event()
        self.server: GrpcServer

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        await self.answers_probes.wait()
        info = worker_pb2.GetWorkerInfoResponse(
            worker_id=self.worker_id,
            role=self.role,
            epoch=self.epoch,
            model="tiny",
            model_path=str(self.model_path),
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[1],
            layout=self.layout,
            cache_descriptor=self.cache_descriptor,
            is_draining=self.is_draining,
            is_stalled=self.is_stalled,
            num_blocks=1000,
            address=self.server.address,
            embedding=self.embedding,
        )
        info.MergeFrom(self.described)
        if self.secret:
            info.proof = description_proof(self.secret, request.nonce, info)
        return info

    async def begin_to_stop(self) -> None:
        """Answer as a worker whose process is about to end, until ``serve_again``."""
        self.is_draining = True
        await self.server.report(STOPPING)

    async def serve_again(self) -> None:
        self.is_draining = False
        await self.server.ready()

    async def SetDraining(self, request: Any, context: Any) -> worker_pb2.SetDrainingResponse:
        self.is_draining = request.is_draining
        return worker_pb2.SetDrainingResponse()

    async def CopyBlocks(
        self, request: worker_pb2.CopyBlocksRequest, context: Any
    ) -> worker_pb2.CopyBlocksResponse:
        self.copies.append(request)
        await self.may_copy.wait()
        return worker_pb2.CopyBlocksResponse(pulled=self.pulled)

    async def ForgetBlocks(
        self, request: worker_pb2.ForgetBlocksRequest, context: Any
    ) -> worker_pb2.ForgetBlocksResponse:
        await self._before_token(0)
        self.forgotten.append(request)
        return worker_pb2.ForgetBlocksResponse(num_blocks=len(request.block_hashes) - request.num_kept)

    async def SetRole(self, request: worker_pb2.SetRoleRequest, context: Any) -> worker_pb2.SetRoleResponse:
        await self._before_token(0)
        self.role = request.role
        return worker_pb2.SetRoleResponse()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        self.aborted.set()
        return worker_pb2.AbortResponse(num_generated_tokens=self.num_generated_tokens)

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        self.calls.append(request)
        try:
            position = request.sequence.num_output_tokens
            if self.begins_after is not None:
                await self.begins_after.wait()
            await self._before_token(0)
            first = worker_pb2.PrefillResponse(num_cached_tokens=self.num_cached_tokens)
            if request.HasField("embedding_dimensions") and self.embedding.size:
                first.embedding.extend(
                    embedding_of(request.sequence.token_ids)[: request.embedding_dimensions or 4]
                )
                yield first
                return
            if num_sequences(request.sequence) == 1:
                first.tokens.append(self.script.token(position))
                first.num_generated_tokens = 1
                first.finish_reason = self.script.finish_reason(request.sequence, position)
            yield first
            if first.finish_reason:
                return
            await self._before_token(1)
            self.script.commits[request.ticket.ticket_id].set()
            summary = worker_pb2.PushSummary(num_blocks=3, num_bytes=300, num_held_blocks=1)
            yield worker_pb2.PrefillResponse(pushed=summary)
        finally:
            self.ended.set()

    async def WatchWorker(
        self, request: worker_pb2.WatchWorkerRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchWorkerResponse]:
        report = worker_pb2.WatchWorkerResponse(
            is_stalled=self.is_stalled,
            is_draining=self.is_draining,
            role=self.role,
            load_of_others=self.load_of_others,
        )
        yield report
        while not self.is_quiet:
            await asyncio.sleep(REPORT_SECONDS)
            # Changes of role and draining are for probes to find.
            report.is_stalled = self.is_stalled
            yield report
        await asyncio.Event().wait()

    async def Decode(
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> AsyncIterator[worker_pb2.DecodeResponse]:
        self.calls.append(request)
        try:
            ticket = f"{self.worker_id}-{len(self.calls)}"
            self.script.commits[ticket] = asyncio.Event()
            yield worker_pb2.DecodeResponse(
                accepted=worker_pb2.Accepted(
                    ticket=kvtransfer_pb2.Ticket(ticket_id=ticket), num_cached_tokens=self.num_cached_tokens
                )
            )
            if self.is_left_without_blocks:
                self.is_left_without_blocks = False
                raise Aborted("the prompt's blocks did not arrive")
            position = request.sequence.num_output_tokens
            if request.remote_prefill:
                await self.script.commits[ticket].wait()
                position += num_sequences(request.sequence) == 1
            if request.sequence.sampling.HasField("beam"):
                await self._before_token(0)
                beams = self.script.beams(request.sequence)
                num_generated = len(self.script.answer) * request.sequence.sampling.beam.width
                await self.send(request, worker_pb2.SequenceOutput(num_generated_tokens=num_generated // 2))
                await self._before_token(1)
                for beam in beams:
                    beam.num_generated_tokens = num_generated
                await self.send(request, *beams)
                return
            for count in range(len(self.script.answer)):
                await self._before_token(count)
                reason = self.script.finish_reason(request.sequence, position + count)
                tokens = [
                    self.script.token(position + count, i) for i in range(num_sequences(request.sequence))
                ]
                outputs = [
                    worker_pb2.SequenceOutput(index=index, tokens=[token], finish_reason=reason)
                    for index, token in enumerate(tokens)
                ]
                await self.send(request, *outputs)
                if reason:
                    return
        finally:
            self.ended.set()

    async def _before_token(self, count: int) -> None:
        if self.pause_before_token == count:
            self.paused.set()
            await self.goes_on.wait()
        if self.fault is not None and self.fault.before_token == count:
            fault, self.fault = self.fault, None
            # gRPC may bring the error of a call before what another call has sent earlier.
            while any(self._num_received[each] < self.num_sent[each] for each in self.streams):
                await asyncio.sleep(0.001)
            raise fault.error


@dataclass
class Cluster:
    """Fake workers that the test may add to, and the router's client once it runs."""

    script: Script
    model_folder: Path
    stack: AsyncExitStack
    workers: dict[str, FakeWorker] = field(default_factory=dict)
    running: RunningRouter | None = None
    num_received: Counter[str] = field(default_factory=Counter)
    """Number of messages that the router has read from each stream of outputs."""

    def __getitem__(self, worker_id: str) -> FakeWorker:
        return self.workers[worker_id]

    async def add(self, worker_id: str, role: str, **attributes: Any) -> FakeWorker:
        """Start a worker."""
        worker = FakeWorker(worker_id, role, self.script, self.model_folder, self.num_received)
        for name, value in attributes.items():
            setattr(worker, name, value)
        service = Service(
            worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, "quire.v1.WorkerService"
        )
        guards = []
        if worker.secret:
            guards.append(RequireProof(worker.secret, worker.epoch, lambda: worker.server.address))
        worker.server = await self.stack.enter_async_context(
            grpc_server([service], registry=CollectorRegistry(), grace_seconds=0, interceptors=guards)
        )
        await worker.server.ready()
        self.workers[worker_id] = worker
        return worker

    def change(self, role: str = "", **attributes: Any) -> None:
        """Change all workers, or those of a role."""
        for worker in self.workers.values():
            if role in ("", worker.role):
                vars(worker).update(attributes)

    def calls(self, role: str = "") -> list[Any]:
        """Return the calls of all workers, or of those of a role."""
        return [call for each in self.workers.values() if role in ("", each.role) for call in each.calls]

    async def start(self, **options: Any) -> pb_grpc.GenerationServiceStub:
        """Start the router in front of the workers and return its client."""
        addresses = tuple(worker.server.address for worker in self.workers.values())
        config = RouterConfig(
            **{
                "port": 0,
                "metrics_port": 0,
                "worker_addresses": addresses,
                "worker_wait_seconds": 5.0 if addresses else 0.05,
                "poll_seconds": 0.05,
                "grace_seconds": 0.0,
                # Short as they are, prompts go to prefill workers.
                "placing": PolicyConfig(local_prefill_tokens=0),
                **options,
            }
        )
        self.running = await self.stack.enter_async_context(router(config))
        while len(self.running.workers.all()) < len(addresses):
            await self.running.workers.refresh()
        channel = await self.stack.enter_async_context(grpc.aio.insecure_channel(self.running.address))
        return pb_grpc.GenerationServiceStub(channel)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 where nothing was counted."""
        assert self.running is not None
        return self.running.metrics.registry.get_sample_value(name, labels) or 0.0
