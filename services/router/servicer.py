"""The public API, served by the router."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.services.errors import ResourceExhausted, ServiceError, Unavailable
from quire.services.log import get_logger
from quire.services.router.generation import Cluster, GenerationRun
from quire.services.router.metrics import RouterMetrics
from quire.services.router.validation import check_token_ids, encode_chat, encode_text, validate

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name
RETRY_AFTER_SECONDS = 1.0

_FINISH_NAMES = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_log = get_logger("router")


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Serves ``GenerationService``; ``cluster`` resolves when the first worker has told the model."""

    def __init__(
        self,
        cluster: asyncio.Future[Cluster],
        metrics: RouterMetrics,
        clock: Callable[[], float],
        *,
        request_timeout_seconds: float,
        max_requests: int,
        join_wait_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._clock = clock
        self._request_timeout_seconds = request_timeout_seconds
        self._max_requests = max_requests
        self._join_wait_seconds = join_wait_seconds
        self._num_requests = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Collect the stream."""
        whole = pb.GenerateResponse()
        answers: dict[int, list[pb.GenerateStreamResponse]] = {}
        async with aclosing(self._generate(request.generation, context)) as responses:
            async for response in responses:
                answers.setdefault(response.index, []).append(response)
                whole.prompt_logprobs.extend(response.prompt_logprobs)
                whole.request_id = whole.request_id or response.request_id
                if response.HasField("usage"):
                    whole.usage.CopyFrom(response.usage)
        whole.choices.extend(_choice(answers[index]) for index in sorted(answers))
        return whole

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Stream the answer."""
        async with aclosing(self._generate(request.generation, context)) as responses:
            async for response in responses:
                yield response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Encode text or a conversation."""
        model = (await self._joined_cluster()).model
        if request.WhichOneof("prompt") == "chat":
            return pb.TokenizeResponse(token_ids=await encode_chat(request.chat, model))
        return pb.TokenizeResponse(token_ids=await encode_text(request.text, model))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Decode token ids."""
        model = (await self._joined_cluster()).model
        check_token_ids(request.token_ids, model, "token_ids")
        text = await asyncio.to_thread(model.tokenizer.decode, list(request.token_ids))
        return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Describe the model and count the workers."""
        cluster = await self._joined_cluster()
        return pb.GetModelInfoResponse(
            model=cluster.model.name,
            max_model_len=cluster.model.max_model_len,
            vocab_size=cluster.model.vocab_size,
            eos_token_ids=sorted(cluster.model.eos_token_ids),
            block_size=cluster.model.block_size,
            num_prefill_workers=len(cluster.workers.live("prefill")),
            num_decode_workers=len(cluster.workers.live("decode")),
        )

    async def _generate(
        self, generation: pb.Generation, context: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        arrival = self._clock()
        deadline = arrival + min(_remaining_seconds(context), self._request_timeout_seconds)
        with self._admitted():
            cluster = await self._joined_cluster()
            request = await validate(generation, cluster.model)
            self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
            run = GenerationRun(cluster, request, deadline)
            with self._logged(request.request_id, run.usage, arrival):
                async with aclosing(run.stream()) as responses:
                    async for response in self._timed(responses, arrival):
                        yield response

    async def _timed(
        self, responses: AsyncIterator[pb.GenerateStreamResponse], arrival: float
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Pass an answer on and observe its latencies."""
        metrics = self._metrics
        last: dict[int, float] = {}
        async for response in responses:
            now = self._clock()
            if response.token_ids:
                metrics.generation_tokens.inc(len(response.token_ids))
                if not last:
                    metrics.time_to_first_token.observe(now - arrival)
                elif response.index in last:
                    metrics.inter_token_latency.observe(now - last[response.index])
                last[response.index] = now
            if response.HasField("usage"):
                metrics.e2e_latency.observe(now - arrival)
                metrics.success.labels(_FINISH_NAMES[response.finish_reason]).inc()
                metrics.prompt_tokens_cached.inc(response.usage.cached_prompt_tokens)
            yield response

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._num_requests >= self._max_requests:
            self._metrics.rejections.labels("max_requests").inc()
            raise ResourceExhausted(
                f"{self._max_requests} requests are running, the most that this router takes; try again",
                metadata={"limit": str(self._max_requests)},
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._num_requests += 1
        self._metrics.requests_running.inc()
        try:
            yield
        finally:
            self._num_requests -= 1
            self._metrics.requests_running.dec()

    @contextmanager
    def _logged(self, request_id: str, usage: pb.Usage, arrival: float) -> Iterator[None]:
        """Log how a request ended, and count it if it failed."""
        outcome = "OK"
        try:
            yield
        except ServiceError as error:
            outcome = error.code.name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = grpc.StatusCode.CANCELLED.name
            raise
        except Exception:
            outcome = grpc.StatusCode.INTERNAL.name
            raise
        finally:
            if outcome != "OK":
                self._metrics.failure.labels(outcome).inc()
            _log.info(
                "request_finished",
                request_id=request_id,
                outcome=outcome,
                seconds=self._clock() - arrival,
                prompt_tokens=usage.prompt_tokens,
                cached_prompt_tokens=usage.cached_prompt_tokens,
                completion_tokens=usage.completion_tokens,
                blocks_shipped=usage.blocks_shipped,
                blocks_pulled=usage.blocks_pulled,
                retries=usage.retries,
            )

    async def _joined_cluster(self) -> Cluster:
        """Return the cluster, after a short wait if no worker has ever joined."""
        try:
            async with asyncio.timeout(self._join_wait_seconds):
                return await asyncio.shield(self._cluster)
        except TimeoutError:
            raise Unavailable(
                "no worker has joined yet; start prefill and decode workers, or try again",
                reason="NO_WORKER",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            ) from None


def _choice(responses: Sequence[pb.GenerateStreamResponse]) -> pb.Choice:
    """Return the whole of one streamed answer."""
    last = responses[-1]
    return pb.Choice(
        index=last.index,
        text="".join(response.text for response in responses),
        token_ids=[token_id for response in responses for token_id in response.token_ids],
        finish_reason=last.finish_reason,
        logprobs=[each for response in responses for each in response.logprobs],
        score=last.score if last.HasField("score") else None,
    )


def _remaining_seconds(context: Any) -> float:
    remaining = context.time_remaining()
    return math.inf if remaining is None else float(remaining)
