"""Calls that would never end: an engine that says nothing, a stream of loads; behind a real server."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from prometheus_client import CollectorRegistry
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from quire.kvindex.kv_layout import KvLayout
from quire.protos import worker_pb2
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.errors import Unavailable
from quire.rpc.server import grpc_server
from quire.services.vllm_adapter import servicer
from quire.services.vllm_adapter.servicer import vllm_service
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.prompt_steps import LocalDecode
from quire.services.worker.requests.updates import Updates
from quire.services.worker.state import WorkerState
from tests.testing.rpc_errors import error_of

WAIT_SECONDS = 20.0


@pytest.fixture
def has_ended(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let decodes begin and say nothing; return the event that one of them has ended."""
    event = asyncio.Event()

    @asynccontextmanager
    async def decoding_here(*_: object) -> AsyncIterator[LocalDecode]:
        try:
            yield LocalDecode(worker_pb2.DecodeResponse(), Mock(), Updates())
        finally:
            event.set()

    monkeypatch.setattr(servicer, "decoding_here", decoding_here)
    return event


class Idle:
    """Has nothing to do."""

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Any) -> worker_pb2.GetLoadResponse:
        return worker_pb2.GetLoadResponse()


@asynccontextmanager
async def served(
    worker: Any, folder: Path, state: WorkerState | None = None
) -> AsyncIterator[VllmEngineStub]:
    """Serve a worker, by default one that decodes, and yield a stub of it."""
    state = state or WorkerState("decode")
    identity = WorkerIdentity(
        worker_id="w",
        epoch="e",
        model="tiny",
        model_path=str(folder),
        layout=KvLayout(1, 1, 4, 8, "float32", "digest", "float32", "float32-1"),
        num_blocks=8,
        max_model_len=64,
        vocab_size=320,
        eos_token_ids=frozenset({1}),
        cluster_secret=b"",
    )
    service = vllm_service(worker, Mock(identity=identity, state=state), 8, ClusterTrust())
    async with (
        asyncio.timeout(WAIT_SECONDS),
        grpc_server([service], registry=CollectorRegistry()) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield VllmEngineStub(channel)


REQUEST = vllm.GenerateRequest(request_id="r", tokenized=vllm.TokenizedInput(input_ids=[5]))


async def test_a_request_that_takes_too_long_ends_although_its_caller_set_no_deadline(
    model_folder: Path, has_ended: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "NO_DEADLINE_SECONDS", 0.2)
    async with served(Mock(), model_folder) as engine:
        await error_of(engine.Generate(REQUEST), grpc.StatusCode.DEADLINE_EXCEEDED, "0.2 s")
        await has_ended.wait()


async def test_a_gateway_gets_the_models_own_defaults_and_applies_them_itself(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "max_new_tokens": 9}')
    sequences: list[worker_pb2.Sequence] = []

    @asynccontextmanager
    async def decoding_here(_: Any, decode: worker_pb2.DecodeRequest, *__: object) -> AsyncIterator[None]:
        sequences.append(decode.sequence)
        raise Unavailable("seen")
        yield

    monkeypatch.setattr(servicer, "decoding_here", decoding_here)
    async with served(Mock(), folder) as engine:
        model = await engine.GetModelInfo(vllm.GetModelInfoRequest())
        assert json.loads(model.default_sampling_params_json) == {"temperature": 0.25, "max_tokens": 9}
        await error_of(engine.Generate(REQUEST), text="seen")
    assert (sequences[0].sampling.temperature, sequences[0].stopping.max_tokens) == (1.0, 63)


async def test_a_request_with_a_deadline_has_no_other_limit(
    model_folder: Path, has_ended: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "NO_DEADLINE_SECONDS", 0.0)
    async with served(Mock(), model_folder) as engine:
        call = engine.Generate(REQUEST, timeout=1.0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(has_ended.wait(), 0.5)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await has_ended.wait()


@pytest.mark.slow
async def test_subscribers_do_not_keep_a_worker_from_stopping(model_folder: Path) -> None:
    state = WorkerState("decode")
    async with served(Idle(), model_folder, state) as engine:
        batches = aiter(engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
        assert not (await anext(batches)).load.load_only
        assert (await anext(batches)).load.load_only
        state.stop()
        async for batch in batches:
            assert batch.load.sample <= 2


async def test_a_worker_serves_gateways_in_its_present_role(
    model_folder: Path, has_ended: asyncio.Event
) -> None:
    state = WorkerState("decode")

    async def kv_role(engine: VllmEngineStub) -> str:
        info = await engine.GetServerInfo(vllm.GetServerInfoRequest())
        return str(info.kv_role)

    async with served(Idle(), model_folder, state) as engine:
        assert await kv_role(engine) == "kv_consumer"
        decoding = engine.Generate(REQUEST, timeout=0.2)
        assert await decoding.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await has_ended.wait()
        state.change_role("prefill")
        assert await kv_role(engine) == "kv_producer"
        await error_of(engine.Generate(REQUEST).read(), text="must be 1 at a prefill worker")
        assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
        state.set_draining(True)
        assert not (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
