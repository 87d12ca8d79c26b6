"""Serves ``vllm.grpc.engine.VllmEngine`` over one worker.

A gateway that has only decode workers sends them complete requests. A gateway that also has prefill workers
first sends each prompt to one of them. It then sends the request, with the hand-off that the prefill worker
returned, to a decode worker. The decode worker pulls the prompt's blocks, and computes those that it cannot
get.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from quire.models.source import CONFIGURATION_FILES, TOKENIZER_FILES, find_model, without_revision
from quire.protos import worker_pb2
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.errors import (
    DeadlineExceeded,
    InvalidArgument,
    OutOfRange,
    ServiceError,
    Unimplemented,
)
from quire.rpc.server import Service
from quire.sampling.messages import to_proto
from quire.services.requests.served_model import ServedModel, load_served_model
from quire.services.requests.validation import ValidRequest, validate
from quire.services.vllm_adapter.answers import AnswerWriter
from quire.services.vllm_adapter.hand_off import hand_off, has_hand_off, num_cached_tokens, pull_source
from quire.services.vllm_adapter.requests import fields_as_sent, generation_from_proto
from quire.services.worker.parts import WorkerParts
from quire.services.worker.prompt_steps import decoding_here
from quire.services.worker.requests.convert import converting, outputs_to_proto
from quire.services.worker.servicer import WorkerServicer
from quire.tokenization.tokenizer import load_model_files

SERVICE = "vllm.grpc.engine.VllmEngine"
ALL_ATTEMPTS = 2**32 - 1
FLUSH_POLL_SECONDS = 0.05
MAX_FLUSH_SECONDS = 60.0
LOAD_SECONDS = 1.0
NO_DEADLINE_SECONDS = 600.0
"""Time limit of a request whose call has no deadline; most gateways set none."""
Responses = AsyncGenerator[vllm.GenerateResponse, None]

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def vllm_service(
    worker: WorkerServicer, parts: WorkerParts, max_num_seqs: int, trust: ClusterTrust
) -> Service:
    """Return the service over a worker; this reads the model's files.

    Raises:
        MissingTokenizerError: the model has no ``tokenizer.json``.
    """
    model = load_served_model(parts.identity.to_proto())
    servicer = VllmEngineServicer(worker, parts, model, max_num_seqs, trust)
    return Service(vllm_grpc.add_VllmEngineServicer_to_server, servicer, SERVICE)


class VllmEngineServicer(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves a worker to gateways as one of vLLM's engines, which takes and returns token ids."""

    def __init__(
        self,
        worker: WorkerServicer,
        parts: WorkerParts,
        model: ServedModel,
        max_num_seqs: int,
        trust: ClusterTrust,
    ) -> None:
        self._worker = worker
        self._parts = parts
        self._identity = parts.identity
        self._state = parts.state
        # A gateway applies the defaults itself.
        self._model = replace(model, sampling_defaults={})
        self._defaults = json.dumps(dict(model.sampling_defaults)) if model.sampling_defaults else ""
        self._max_num_seqs = max_num_seqs
        self._trust = trust
        self._start = time.monotonic()

    # --- generation ---------------------------------------------------------------------------------------

    async def Generate(
        self, request: vllm.GenerateRequest, context: Any
    ) -> AsyncIterator[vllm.GenerateResponse]:
        """Generate the answers of a request; a prefill worker computes only the prompt and one token."""
        generation = generation_from_proto(request)
        run = self._decode
        if self._state.role == "prefill":
            run = self._prefill
            # The decode worker samples the first token again, so the format has no effect here. Gateways send
            # it together with ignore_eos, and the two contradict each other.
            generation.ClearField("format")
        with fields_as_sent():
            valid = await validate(generation, self._model)
        # gRPC itself ends a call with a deadline.
        seconds = NO_DEADLINE_SECONDS if context.time_remaining() is None else None
        try:
            with fields_as_sent():
                async with asyncio.timeout(seconds), aclosing(run(request, valid, context)) as responses:
                    async for response in responses:
                        yield response
        except TimeoutError:
            raise DeadlineExceeded(f"the answer took more than {seconds:g} s") from None

    async def _prefill(self, request: vllm.GenerateRequest, valid: ValidRequest, context: Any) -> Responses:
        """Compute a prompt, and yield an answer whose hand-off says where the prompt's blocks are."""
        if valid.params.max_tokens != 1:
            raise InvalidArgument(
                "sampling_params.max_tokens",
                "must be 1 at a prefill worker; send whole requests to decode workers",
            )
        if valid.params.n > 1:
            raise InvalidArgument("sampling_params.n", "must be 1 at a prefill worker")
        if has_hand_off(request):
            raise InvalidArgument(
                "kv_transfer_params_json",
                "do_remote_prefill is for a decode worker, and this is a prefill worker",
            )
        prefill = worker_pb2.PrefillRequest(sequence=_sequence(valid))
        answer = AnswerWriter(valid, self._model.tokenizer, 0)
        async with aclosing(self._worker.Prefill(prefill, context)) as responses:
            async for response in responses:
                answer.num_cached_tokens = response.num_cached_tokens
                answer.prompt_logprobs = response.prompt_logprobs
                answer.add(response.tokens, response.finish_reason)
        num_blocks = len(valid.prompt_token_ids) // self._model.block_size
        answer.hand_off = hand_off(
            self._parts.address(),
            self._identity.epoch,
            num_blocks,
            self._trust.secret,
            answer.num_cached_tokens,
        )
        if request.stream:
            yield answer.chunk()
        yield answer.complete()

    async def _decode(self, request: vllm.GenerateRequest, valid: ValidRequest, context: Any) -> Responses:
        """Generate all answers; if the request has a hand-off, first pull the prompt's blocks."""
        decode = worker_pb2.DecodeRequest(
            sequence=_sequence(valid), pull_from=pull_source(request, self._trust)
        )
        answers = [AnswerWriter(valid, self._model.tokenizer, index) for index in range(valid.params.n)]
        async with decoding_here(self._parts, decode, context) as (response, _, updates):
            num_cached = num_cached_tokens(request, response.accepted.num_cached_tokens)
            for answer in answers:
                answer.num_cached_tokens = num_cached
                answer.prompt_logprobs = response.prompt_logprobs
            while not all(answer.is_finished for answer in answers):
                batch = await updates.next_batch()
                with converting():
                    outputs = outputs_to_proto(batch)
                for output in outputs:
                    answer = answers[output.index]
                    if answer.is_finished:
                        continue
                    answer.add(output.tokens, output.finish_reason)
                    if request.stream:
                        yield answer.chunk()
                    if answer.is_finished:
                        yield answer.complete()

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """End requests; ids of unknown and ended requests are ignored."""
        abort = worker_pb2.AbortRequest(sequence_ids=request.request_ids, attempt=ALL_ATTEMPTS)
        await self._worker.Abort(abort, context)
        return vllm.AbortResponse()

    # --- description and state of the worker --------------------------------------------------------------

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: Any) -> vllm.HealthCheckResponse:
        """Return whether this worker should get requests; it is not healthy while it drains."""
        try:
            await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)
        except ServiceError as error:
            return vllm.HealthCheckResponse(healthy=False, message=str(error))
        if self._state.is_draining:
            return vllm.HealthCheckResponse(healthy=False, message="draining")
        return vllm.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Any
    ) -> vllm.GetModelInfoResponse:
        """Return the model's names, limits and architecture."""
        identity = self._identity
        config = await asyncio.to_thread(_model_config, identity.model_path)
        return vllm.GetModelInfoResponse(
            model_path=without_revision(identity.model_path),
            tokenizer_path=without_revision(identity.model_path),
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
            default_sampling_params_json=self._defaults,
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Any
    ) -> vllm.GetServerInfoResponse:
        """Return the worker's state, and a fingerprint that is equal for workers that can share blocks."""
        identity = self._identity
        load = await self._worker.GetLoad(worker_pb2.GetLoadRequest(), context)
        return vllm.GetServerInfoResponse(
            server_type="vllm-grpc",
            active_requests=load.num_running + load.num_waiting,
            uptime_seconds=time.monotonic() - self._start,
            data_parallel_size=1,
            max_num_seqs=self._max_num_seqs,
            kv_connector="QuireConnector",
            kv_role=_KV_ROLES[self._state.role],
            kv_engine_id=identity.epoch,
            kv_cache_dtype=identity.layout.dtype,
            block_size=identity.layout.block_size,
            # The fingerprints are equal exactly if the blocks are interchangeable. A gateway pairs only
            # workers with the same value.
            pairing_protocol=identity.fingerprint,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: Any) -> vllm.GetLoadsResponse:
        """Return the worker's numbers of requests and of tokens in its blocks."""
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
        """Yield the tokenizer's files as an archive, for a gateway that does not have the model's folder."""
        folder = (await asyncio.to_thread(load_model_files, self._identity.model_path)).folder
        for piece in pieces(await asyncio.to_thread(tokenizer_archive, folder)):
            yield piece

    # --- load, operators' calls, and those that are not served --------------------------------------------

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Any
    ) -> common_pb2.FlushCacheResponse:
        """Drop all cached blocks, after waiting up to ``timeout_s`` until no request uses a block."""
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
        """Refuse the call, because embeddings are not supported."""
        raise Unimplemented("the model generates; it embeds nothing")

    async def StartProfile(self, request: Any, context: Any) -> common_pb2.ProfileResponse:
        """Refuse the call, because there is no profiler."""
        raise Unimplemented("there is no profiler; the worker's metrics have the time of each step's phases")

    StopProfile = StartProfile

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the worker's load until the worker stops.

        The batches name no blocks. Gateways then track prefixes by the requests that they have sent.
        """
        if request.start_sequence_number:
            raise OutOfRange("this stream has no history: subscribe with start_sequence_number 0")
        for sample in count():
            if self._state.is_stopping:
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
    sequence = to_proto(valid.params, valid.format)
    sequence.sequence_id = valid.request_id
    sequence.token_ids.extend(valid.prompt_token_ids)
    return sequence


def _model_config(model_path: str) -> dict[str, Any]:
    """Return the contents of the model's ``config.json``."""
    path = find_model(model_path, CONFIGURATION_FILES) / "config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return config


FILES = (*TOKENIZER_FILES, *CONFIGURATION_FILES)
PIECE_BYTES = 64 << 10


def tokenizer_archive(folder: Path) -> bytes:
    """Return a zip archive of the tokenizer's files and of the model's configuration."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for path in (folder / name for name in FILES):
            if path.is_file():
                files.write(path, path.name)
    return archive.getvalue()


def pieces(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield an archive in pieces of at most ``PIECE_BYTES``; the last piece has the archive's SHA-256."""
    for start in range(0, len(archive), PIECE_BYTES):
        is_last = start + PIECE_BYTES >= len(archive)
        yield common_pb2.GetTokenizerChunk(
            data=archive[start : start + PIECE_BYTES],
            sha256=hashlib.sha256(archive).hexdigest() if is_last else "",
        )
