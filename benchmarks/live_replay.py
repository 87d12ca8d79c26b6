"""Sends the requests of a trace to a live stack: equal block ids become equal tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc

from quire.cli.bench.dataset_files import tokens_of
from quire.cli.bench.load import open_loop, send
from quire.cli.bench.summary import RequestRecord
from quire.cli.bench.workload import BenchRequest
from quire.client import AsyncClient
from quire.protos import inference_pb2, worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.rpc.channels import NO_PROXY
from quire.services.local.stack import RunningStack
from quire.simulator.calibrate import PullSpeed, vocabulary_of
from quire.simulator.cluster import RequestOutcome
from quire.simulator.figures import quantile
from quire.simulator.trace import TraceRequest


def latencies(outcomes: Sequence[RequestRecord] | Sequence[RequestOutcome]) -> dict[str, Any]:
    """Return quantiles of the latencies in milliseconds."""
    ttft = sorted(1000 * outcome.ttft_seconds for outcome in outcomes)
    tpot = sorted(1000 * outcome.tpot_seconds for outcome in outcomes)
    return {
        "ttft_p50_ms": round(quantile(ttft, 0.5), 2),
        "ttft_p90_ms": round(quantile(ttft, 0.9), 2),
        "tpot_p50_ms": round(quantile(tpot, 0.5), 2),
    }


async def replay_live(
    address: str, requests: Sequence[TraceRequest], block_tokens: int
) -> list[RequestRecord]:
    """Send each request at its time, whether or not the earlier ones have ended."""
    records: list[RequestRecord] = []
    async with AsyncClient(address) as client:
        vocabulary = vocabulary_of(await client.model_info())

        async def send_one(request: BenchRequest, due_seconds: float) -> None:
            records.append(await send(client, request, due_seconds))

        made = [
            BenchRequest(
                tokens_of(each, block_tokens, vocabulary),
                {"max_tokens": each.output_tokens, "ignore_eos": True, "temperature": 0.0},
            )
            for each in requests
        ]
        await open_loop(made, [each.arrival_seconds for each in requests], send_one)
    return records


@asynccontextmanager
async def workers(stack: RunningStack) -> AsyncIterator[dict[str, WorkerServiceStub]]:
    """Yield a stub of each worker."""
    channels = {
        name: grpc.aio.insecure_channel(worker.address, options=[NO_PROXY])
        for name, worker in stack.ready.items()
    }
    try:
        yield {name: WorkerServiceStub(stack.peer(name, channel)) for name, channel in channels.items()}
    finally:
        for channel in channels.values():
            await channel.close(grace=None)


async def measure_pulls(stack: RunningStack) -> PullSpeed:
    """Let one prefill worker copy prompts of two lengths from another; return the line through both."""
    seconds: list[float] = []
    num_bytes: list[float] = []
    rng = Random(time.time_ns())
    async with workers(stack) as stubs:
        info = await stubs["prefill-0"].GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        for length in (256, 2048):
            samples: list[worker_pb2.PullSummary] = []
            for repeat in range(5):
                prompt = rng.choices(range(2, 258), k=length)
                await _prefill(stubs["prefill-0"], f"hold-{length}-{repeat}-{rng.random()}", prompt, None)
                source = worker_pb2.PullSource(
                    address=stack.ready["prefill-0"].address, epoch=info.epoch, num_blocks=length
                )
                response = await _prefill(
                    stubs["prefill-1"], f"pull-{length}-{repeat}-{rng.random()}", prompt, source
                )
                samples.append(response.pulled)
            best = sorted(samples, key=lambda pulled: pulled.seconds)[len(samples) // 2]
            seconds.append(best.seconds)
            num_bytes.append(best.num_bytes)
    bytes_per_second = (num_bytes[1] - num_bytes[0]) / max(1e-6, seconds[1] - seconds[0])
    return PullSpeed(bytes_per_second, max(0.0, seconds[0] - num_bytes[0] / bytes_per_second))


async def _prefill(
    stub: WorkerServiceStub, name: str, prompt: list[int], source: worker_pb2.PullSource | None
) -> worker_pb2.PrefillResponse:
    sequence = worker_pb2.Sequence(
        sequence_id=name,
        token_ids=prompt,
        sampling=inference_pb2.SamplingParams(temperature=0.0, top_p=1.0),
        stopping=inference_pb2.StoppingParams(max_tokens=2, ignore_eos=True),
    )
    request = worker_pb2.PrefillRequest(sequence=sequence, pull_from=source)
    responses: list[worker_pb2.PrefillResponse] = [m async for m in stub.Prefill(request, timeout=60)]
    return responses[0]
