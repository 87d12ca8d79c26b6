"""Serves ``vllm.grpc.engine.VllmEngine`` over one worker.

A gateway in front of decode workers alone sends them whole requests. One in front of prefill workers too
sends each prompt to one of those first, and what that returns along with the request to a decode worker,
which pulls the prompt's blocks: those it cannot have it computes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from quire.protos import worker_pb2
from quire.services.errors import DeadlineExceeded, InvalidArgument, OutOfRange, ServiceError, Unimplemented
from quire.services.grpc_server import Service
from quire.services.served_model import ServedModel, load_served_model
from quire.services.validation import ValidRequest, validate
from quire.services.vllm_adapter.answers import Answer
from quire.services.vllm_adapter.hand_off import hand_off, pull_source
from quire.services.vllm_adapter.requests import generation_from_proto
from quire.services.vllm_adapter.tokenizer_archive import pieces, tokenizer_archive
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.servicer import WorkerServicer
from quire.tokenization.tokenizer import load_model_files

SERVICE = "vllm.grpc.engine.VllmEngine"
ALL_ATTEMPTS = 2**32 - 1
FLUSH_POLL_SECONDS = 0.05
MAX_FLUSH_SECONDS = 60.0
LOAD_SECONDS = 1.0

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def vllm_service(
    worker: WorkerServicer, identity: WorkerIdentity, max_num_seqs: int, address: Callable[[], str]
) -> Service:
    """Return the service over a worker; ``address`` says where other workers reach it. Reads files.

    Raises:
        MissingTokenizerError: the model has no ``tokenizer.json``.
    """
    model = load_served_model(identity.to_proto())
    servicer = VllmEngineServicer(worker, identity, model, max_num_seqs, address)
    return Service(vllm_grpc.add_VllmEngineServicer_to_server, servicer, SERVICE)


class VllmEngineServicer(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]
    """A worker as gateways see vLLM's engines: token ids in, token ids out."""

    def __init__(
        self,
        worker: WorkerServicer,
        identity: WorkerIdentity,
        model: ServedModel,
        max_num_seqs: int,
        address: Callable[[], str],
    ) -> None:
        self._worker = worker
        self._identity = identity
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._address = address
        self._start = time.monotonic()

    # --- generation ---------------------------------------------------------------------------------------

    async def Generate(
        self, request: vllm.GenerateRequest, context: Any
    ) -> AsyncIterator[vllm.GenerateResponse]:
        """Answer a request, or as a prefill worker its beginning."""
        generation = generation_from_proto(request)
        if self._identity.role == "prefill":
            # The decode worker draws the first token anew. With the format of the request gateways send
            # ignore_eos, and the two contradict each other.
            generation.ClearField("format")
        valid = await validate(generation, self._model)
        run = self._prefill if self._identity.role == "prefill" else self._decode
        seconds = self._identity.request_timeout_seconds
        try:
            # Gateways set no deadlines of their own.
            async with asyncio.timeout(seconds), aclosing(run(request, valid, context)) as responses:
                async for response in responses:
                    yield response
        except TimeoutError:
            raise DeadlineExceeded(f"the answer took more than {seconds:g} s") from None

    async def _prefill(
        self, request: vllm.GenerateRequest, valid: ValidRequest, context: Any
    ) -> AsyncGenerator[vllm.GenerateResponse, None]:
        """Compute a prompt and say where its blocks are."""
        if valid.stopping.max_tokens != 1:
            raise InvalidArgument(
                "sampling_params.max_tokens",
                "must be 1 at a prefill worker; send whole requests to decode workers",
            )
        if valid.sampling.n > 1:
            raise InvalidArgument("sampling_params.n", "must be 1 at a prefill worker")
        if pull_source(request) is not None:
            raise InvalidArgument(
                "kv_transfer_params_json",
                "do_remote_prefill is for a decode worker, and this is a prefill worker",
            )
        prefill = worker_pb2.PrefillRequest(sequence=_sequence(valid))
        answer = Answer(valid, self._model.tokenizer, 0)
        async with aclosing(self._worker.Prefill(prefill, context)) as responses:
            async for response in responses:
                answer.num_cached_tokens = response.num_cached_tokens
                answer.prompt_logprobs = response.prompt_logprobs
                answer.add(response.tokens, response.finish_reason)
        num_blocks = len(valid.prompt_token_ids) // self._model.block_size
        answer.hand_off = hand_off(self._address(), self._identity.epoch, num_blocks)
        if request.stream:
            yield answer.chunk()
        yield answer.complete()

    async def _decode(
        self, request: vllm.GenerateRequest, valid: ValidRequest, context: Any
    ) -> AsyncGenerator[vllm.GenerateResponse, None]:
        """Generate, from blocks that a prefill worker holds if the request names one."""
        decode = worker_pb2.DecodeRequest(sequence=_sequence(valid), pull_from=pull_source(request))
        answers = [Answer(valid, self._model.tokenizer, index) for index in range(max(1, valid.sampling.n))]
        async with aclosing(self._worker.Decode(decode, context)) as responses:
            async for response in responses:
                if response.HasField("accepted"):
                    for answer in answers:
                        answer.num_cached_tokens = response.accepted.num_cached_tokens
                        answer.prompt_logprobs = response.prompt_logprobs
                for output in response.outputs:
                    answer = answers[output.index]
                    if answer.is_finished:
                        continue
                    answer.add(output.tokens, output.finish_reason)
                    if request.stream:
                        yield answer.chunk()
                    if answer.is_finished:
                        yield answer.complete()
                if all(answer.is_finished for answer in answers):
                    return

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """End requests; unknown and ended ones are no error."""
        abort = worker_pb2.AbortRequest(request_ids=request.request_ids, attempt=ALL_ATTEMPTS)
        await self._worker.Abort(abort, context)
        return vllm.AbortResponse()

    # --- what the worker is, and how it is ----------------------------------------------------------------

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        """Say whether requests should be sent here."""
        try:
            await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)
        except ServiceError as error:
            return vllm.HealthCheckResponse(healthy=False, message=str(error))
        info = await self._worker.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), context)
        if info.is_draining:
            return vllm.HealthCheckResponse(healthy=False, message="draining")
        return vllm.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Any
    ) -> vllm.GetModelInfoResponse:
        """Describe the model."""
        identity = self._identity
        config = await asyncio.to_thread(_model_config, identity.model_path)
        return vllm.GetModelInfoResponse(
            model_path=identity.model_path,
            tokenizer_path=identity.model_path,
            served_model_name=identity.model,
            is_generation=True,
            max_context_length=identity.max_model_len,
            max_req_input_len=identity.max_model_len - 1,
            vocab_size=identity.vocab_size,
            eos_token_ids=sorted(identity.eos_token_ids),
            model_type=config.get("model_type"),
            architectures=config.get("architectures"),
            bos_token_id=config.get("bos_token_id"),
            pad_token_id=config.get("pad_token_id"),
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Any
    ) -> vllm.GetServerInfoResponse:
        """Describe the worker, and with which others it can share blocks."""
        identity = self._identity
        load = await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)
        return vllm.GetServerInfoResponse(
            server_type="vllm-grpc",
            active_requests=load.num_running + load.num_waiting,
            uptime_seconds=time.monotonic() - self._start,
            data_parallel_size=1,
            max_num_seqs=self._max_num_seqs,
            kv_connector="QuireConnector",
            kv_role=_KV_ROLES[identity.role],
            kv_engine_id=identity.epoch,
            kv_cache_dtype=identity.layout.dtype,
            block_size=identity.layout.block_size,
            # Equal exactly where blocks are interchangeable: a gateway pairs no others.
            pairing_protocol=identity.fingerprint,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        """Count the worker's requests and blocks."""
        load = await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)
        block_size, num_blocks = self._model.block_size, self._identity.num_blocks
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=1,
            loads=[
                vllm.SchedulerLoad(
                    num_running_reqs=load.num_running,
                    num_waiting_reqs=load.num_waiting,
                    num_total_reqs=load.num_running + load.num_waiting,
                    num_used_tokens=load.used_blocks * block_size,
                    max_total_num_tokens=num_blocks * block_size,
                    token_usage=load.used_blocks / num_blocks,
                    max_running_requests=self._max_num_seqs,
                    num_waiting_uncached_tokens=load.prefill_backlog_tokens,
                )
            ],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send what a gateway without the model's folder tokenizes with."""
        folder = (await asyncio.to_thread(load_model_files, self._identity.model_path)).folder
        for piece in pieces(await asyncio.to_thread(tokenizer_archive, folder)):
            yield piece

    # --- load, operators' calls, and those that are not served --------------------------------------------

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Any
    ) -> common_pb2.FlushCacheResponse:
        """Forget all cached blocks, once no request uses any."""
        if not 0 <= request.timeout_s <= MAX_FLUSH_SECONDS:
            raise InvalidArgument(
                "timeout_s", f"must be from 0 to {MAX_FLUSH_SECONDS:g}; got {request.timeout_s:g}"
            )
        deadline = time.monotonic() + request.timeout_s
        while (await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)).used_blocks:
            if time.monotonic() >= deadline:
                return common_pb2.FlushCacheResponse(success=False, message="requests are using blocks")
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        cleared = await self._worker.ClearCache(worker_pb2.ClearCacheRequest(), context)
        return common_pb2.FlushCacheResponse(success=True, message=f"forgot {cleared.num_blocks} blocks")

    async def Embed(self, request: vllm.EmbedRequest, context: Any) -> vllm.EmbedResponse:
        """Refuse."""
        raise Unimplemented("the model generates; it embeds nothing")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Any
    ) -> common_pb2.ProfileResponse:
        """Refuse."""
        raise Unimplemented("there is no profiler; the worker's metrics have the time of each step's phases")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Any
    ) -> common_pb2.ProfileResponse:
        """Refuse."""
        raise Unimplemented("there is no profiler; the worker's metrics have the time of each step's phases")

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the worker's load until the worker stops.

        No batch names a block: gateways then follow prefixes by the requests that they sent.
        """
        if request.start_sequence_number:
            raise OutOfRange("this stream has no history: subscribe with start_sequence_number 0")
        for sample in count():
            if self._worker.is_stopping:
                return
            load = await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)
            record = common_pb2.EngineLoad(
                running_requests=load.num_running,
                waiting_requests=load.num_waiting,
                waiting_uncached_tokens=load.prefill_backlog_tokens,
                token_usage=load.used_blocks / self._identity.num_blocks,
                active_token_usage=load.used_blocks / self._identity.num_blocks,
                max_running_requests=self._max_num_seqs,
                sample=sample,
                load_only=sample > 0,
            )
            yield common_pb2.KvEventBatch(timestamp=time.time(), load=record)
            await asyncio.sleep(LOAD_SECONDS)


def _sequence(valid: ValidRequest) -> worker_pb2.Sequence:
    return worker_pb2.Sequence(
        request_id=valid.request_id,
        token_ids=valid.prompt_token_ids,
        sampling=valid.sampling,
        stopping=valid.stopping,
        format=valid.format,
        logprobs=valid.num_logprobs,
        prompt_logprobs=valid.num_prompt_logprobs,
    )


def _model_config(model_path: str) -> dict[str, Any]:
    """Return the model's ``config.json``; a model from the hub has one only where its weights are."""
    path = Path(model_path) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return config
