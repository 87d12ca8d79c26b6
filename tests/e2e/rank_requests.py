"""Stacks whose workers have several ranks, requests to single workers, and the processes of the ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire.protos import inference_pb2, worker_pb2
from quire.routing.planner import PolicyConfig
from quire.services.local import stack as stack_module
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

HEADS = {"intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
NUM_NEW, NUM_FULL = 24, 12
WAIT_SECONDS = 60.0
_names = count()
_WORKER_CONFIGS = stack_module.worker_configs


@contextmanager
def stack_of_ranks(
    model: Path,
    sizes: dict[str, int],
    addresses: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[RunningStack]:
    """Run a stack whose workers have these numbers of ranks, by name.

    Args:
        addresses: where the workers wait for ranks that are not their own processes.
    """

    def configs(*arguments: Any) -> dict[str, WorkerConfig]:
        return {
            name: replace(config, tensor_parallel_size=sizes[name], rank_address=(addresses or {}).get(name))
            for name, config in _WORKER_CONFIGS(*arguments).items()
        }

    worker = {"model": str(model), "num_blocks": 256, "max_model_len": 400, "threads": 1, **settings}
    config = LocalStackConfig(
        num_prefill=sum(name.startswith("prefill") for name in sizes),
        num_decode=sum(name.startswith("decode") for name in sizes),
        router=RouterConfig(port=0, placing=PolicyConfig(local_prefill_tokens=0)),
        worker=WorkerConfig(role="decode", dtype="float32", **worker),
        log_level="error",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_module, "worker_configs", configs)
        with local_stack(config) as stack:
            yield stack


def sequence_of(prompt: list[int], max_tokens: int = NUM_NEW) -> worker_pb2.Sequence:
    return worker_pb2.Sequence(
        sequence_id=f"ranks-{next(_names)}",
        token_ids=prompt,
        logprobs=2,
        sampling=inference_pb2.SamplingParams(temperature=0.8, top_p=1.0, seed=3),
        stopping=inference_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def answer_of(messages: list[Any]) -> list[Any]:
    """Return the tokens and the exact logprobs of the best ones."""
    tokens = [token for each in messages for token in each.tokens]
    return [(token.token_id, token.logprobs.SerializeToString(deterministic=True)) for token in tokens]


async def disaggregated(
    workers: dict[str, Any], prefill: str, decode: str, prompt: list[int], **fields: Any
) -> tuple[list[Any], worker_pb2.Accepted, worker_pb2.PrefillResponse]:
    """Let two workers answer: the one computes the prompt and pushes its blocks to the other."""
    sequence = sequence_of(prompt)
    request = worker_pb2.DecodeRequest(sequence=sequence, remote_prefill=True)
    responses = aiter(workers[decode].Decode(request, timeout=WAIT_SECONDS))
    accepted = (await anext(responses)).accepted
    pushing = worker_pb2.PrefillRequest(sequence=sequence, ticket=accepted.ticket, **fields)
    prefilled = [m async for m in workers[prefill].Prefill(pushing, timeout=WAIT_SECONDS)]
    decoded = [output async for message in responses for output in message.outputs]
    return answer_of([*prefilled, *decoded]), accepted, prefilled[0]


async def local(
    workers: dict[str, Any], name: str, prompt: list[int], **fields: Any
) -> tuple[list[Any], Any]:
    """Let a decode worker compute the prompt, too."""
    request = worker_pb2.DecodeRequest(sequence=sequence_of(prompt), **fields)
    accepted, *rest = [m async for m in workers[name].Decode(request, timeout=WAIT_SECONDS)]
    return answer_of([output for message in rest for output in message.outputs]), accepted.accepted


async def source(stack: RunningStack, workers: dict[str, Any], name: str) -> worker_pb2.PullSource:
    info = await workers[name].GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
    return worker_pb2.PullSource(address=stack.ready[name].address, epoch=info.epoch, num_blocks=NUM_FULL + 1)


def ranks_of(stack: RunningStack, name: str) -> list[int]:
    """Return the processes that a worker has started and that run a rank."""
    worker = stack.workers[name].process.pid
    assert worker is not None
    children = Path(f"/proc/{worker}/task").glob("*/children")
    found = [int(pid) for path in children for pid in path.read_text().split()]
    return [
        pid
        for pid in found
        if b"quire.engine.parallel.local_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


async def ended(process_ids: list[int], seconds: float = WAIT_SECONDS) -> float:
    """Wait until processes have ended; return how long that took."""
    began_at = time.monotonic()
    async with asyncio.timeout(seconds):
        while any(map(is_running, process_ids)):
            await asyncio.sleep(0.02)
    return time.monotonic() - began_at


async def answer(client: Any, prompt: list[int], has_begun: asyncio.Event | None = None) -> list[int]:
    """Stream a long greedy answer."""
    tokens: list[int] = []
    async for delta in client.stream(prompt, temperature=0.0, ignore_eos=True, max_tokens=400):
        tokens += delta.token_ids
        if has_begun is not None:
            has_begun.set()
    return tokens
