"""The public API, served by the router."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any

from quire.kvindex.block_hash import CacheScope
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.services.errors import Unavailable
from quire.services.log import get_logger
from quire.services.phases import Phase, RequestPhases
from quire.services.router.admission import RETRY_AFTER_SECONDS, Admission
from quire.services.router.batch import batch_answers, check_batch_size
from quire.services.router.generation import Cluster, GenerationRun
from quire.services.router.metrics import RouterMetrics
from quire.services.router.request_timer import RequestTimer, outcome_of
from quire.services.router.tenants import Authenticator, Headers, Tenant
from quire.services.tracing import NoTracer, Span, Tracer
from quire.services.validation import check_detokenized, encode_chat, encode_text, validate

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name

_log = get_logger("router")


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Serves ``GenerationService``; ``cluster`` resolves when the first worker has told the model."""

    def __init__(
        self,
        cluster: asyncio.Future[Cluster],
        metrics: RouterMetrics,
        clock: Callable[[], float],
        authenticator: Authenticator,
        admission: Admission,
        *,
        request_timeout_seconds: float,
        join_wait_seconds: float,
        tracer: Tracer | None = None,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._tracer = tracer or NoTracer()
        self._clock = clock
        self._authenticator = authenticator
        self._admission = admission
        self._request_timeout_seconds = request_timeout_seconds
        self._join_wait_seconds = join_wait_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Collect the stream."""
        headers = context.invocation_metadata()
        return await self._whole(request.generation, self._tenant(context), self._deadline(context), headers)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Stream the answer."""
        tenant, deadline = self._tenant(context), self._deadline(context)
        headers = context.invocation_metadata()
        async with aclosing(self.generate(request.generation, tenant, deadline, headers)) as responses:
            async for response in responses:
                yield response

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Any
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        """Perform all generations, a number at a time, and send each answer when it is whole."""
        tenant, deadline = self._tenant(context), self._deadline(context)
        check_batch_size(len(request.generations))
        answers = batch_answers(
            request.generations,
            lambda generation: self._whole(generation, tenant, deadline, context.invocation_metadata()),
            self.places(tenant),
        )
        async with aclosing(answers):
            async for answer in answers:
                yield answer

    async def _whole(
        self, generation: pb.Generation, tenant: Tenant, deadline: float, headers: Headers
    ) -> pb.GenerateResponse:
        async with aclosing(self.generate(generation, tenant, deadline, headers)) as responses:
            return collected([response async for response in responses])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Encode text or a conversation; it takes a request's place, since a long one takes seconds."""
        async with self._admission.admitted(self._tenant(context), self._deadline(context)):
            model = (await self.joined_cluster()).model
            if request.WhichOneof("prompt") == "chat":
                return pb.TokenizeResponse(token_ids=await encode_chat(request.chat, model))
            return pb.TokenizeResponse(token_ids=await encode_text(request.text, model))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Decode token ids."""
        async with self._admission.admitted(self._tenant(context), self._deadline(context)):
            model = (await self.joined_cluster()).model
            check_detokenized(request.token_ids, model, "token_ids")
            text = await asyncio.to_thread(model.tokenizer.decode, list(request.token_ids))
            return pb.DetokenizeResponse(text=text)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Describe the model and count the workers."""
        cluster = await self.joined_cluster()
        return pb.GetModelInfoResponse(
            model=cluster.model.name,
            max_model_len=cluster.model.max_model_len,
            vocab_size=cluster.model.vocab_size,
            eos_token_ids=sorted(cluster.model.eos_token_ids),
            block_size=cluster.model.block_size,
            num_prefill_workers=len(cluster.workers.live("prefill")),
            num_decode_workers=len(cluster.workers.live("decode")),
        )

    @property
    def is_ready(self) -> bool:
        """Whether the model is known and a decode worker lives."""
        return self._cluster.done() and bool(self._cluster.result().workers.live("decode"))

    async def generate(
        self, generation: pb.Generation, tenant: Tenant, deadline: float, headers: Headers = ()
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Admit a tenant's request and stream its answers; what the gRPC and the HTTP API have in common.

        Args:
            deadline: a reading of the clock.
            headers: the call's, which may name a trace.

        Raises:
            ServiceError: it cannot be served, or not to its end.
        """
        timer = RequestTimer(self._metrics, self._clock)
        with self._tracer.span("request", headers) as span, timer.watching():
            async with self._admission.admitted(tenant, deadline) as allowance:
                phases = RequestPhases(self._metrics.phases, span)
                admitted = self._clock()
                phases.record(Phase.ADMIT, timer.arrival, admitted)
                cluster = await self.joined_cluster()
                request = await validate(generation, cluster.model)
                allowance.spend_prompt(len(request.prompt_token_ids))
                phases.record(Phase.TOKENIZE, admitted, self._clock())
                self._metrics.prompt_tokens.inc(len(request.prompt_token_ids))
                self._metrics.request_prompt_tokens.observe(len(request.prompt_token_ids))
                scope = CacheScope(tenant.name, generation.cache_salt)
                run = GenerationRun(cluster, request, scope, deadline, phases)
                with _described(request.request_id, tenant, run.usage, timer, span):
                    async with aclosing(run.stream()) as responses:
                        async for response in responses:
                            timer.sent(response)
                            allowance.spend(len(response.token_ids))
                            yield response

    def tenant_of(self, headers: Headers) -> Tenant:
        """Return whose a request is, by its metadata or HTTP headers.

        Raises:
            Unauthenticated: they prove nobody.
        """
        return self._authenticator.authenticate(headers)

    def deadline(self, timeout_seconds: float = math.inf) -> float:
        """Return the reading of the clock at which a request that begins now must have ended."""
        return self._clock() + min(timeout_seconds, self._request_timeout_seconds)

    def admitted(self, tenant: Tenant) -> AbstractAsyncContextManager[object]:
        """Let other work than a generation take a request's place."""
        return self._admission.admitted(tenant, self.deadline())

    def places(self, tenant: Tenant) -> asyncio.Semaphore:
        """Return what the generations of one call share, so that together they can be admitted."""
        return asyncio.Semaphore(self._admission.num_at_once(tenant))

    def _tenant(self, context: Any) -> Tenant:
        return self.tenant_of(context.invocation_metadata())

    def _deadline(self, context: Any) -> float:
        return self.deadline(_remaining_seconds(context))

    async def joined_cluster(self) -> Cluster:
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


def collected(responses: Sequence[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """Return the whole of a request's stream."""
    answers: dict[int, list[pb.GenerateStreamResponse]] = {}
    for response in responses:
        answers.setdefault(response.index, []).append(response)
    first, last = responses[0], responses[-1]
    return pb.GenerateResponse(
        choices=[_choice(answers[index]) for index in sorted(answers)],
        usage=last.usage,
        request_id=first.request_id,
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_ids=first.prompt_token_ids,
    )


@contextmanager
def _described(
    request_id: str, tenant: Tenant, usage: pb.Usage, timer: RequestTimer, span: Span
) -> Iterator[None]:
    """Say in the log and in the trace, however a request ends, what it was and what it took."""
    outcome = "OK"
    try:
        yield
    except BaseException as error:
        outcome = outcome_of(error)
        raise
    finally:
        span.set(
            quire__request_id=request_id,
            quire__retries=usage.retries,
            quire__bytes_shipped=usage.bytes_shipped,
            gen_ai__usage__input_tokens=usage.prompt_tokens,
            gen_ai__usage__output_tokens=usage.completion_tokens,
            gen_ai__usage__cache_read__input_tokens=usage.cached_prompt_tokens,
        )
        _log.info(
            "request_finished",
            request_id=request_id,
            tenant=tenant.name,
            outcome=outcome,
            seconds=timer.seconds,
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            completion_tokens=usage.completion_tokens,
            blocks_shipped=usage.blocks_shipped,
            blocks_pulled=usage.blocks_pulled,
            retries=usage.retries,
        )


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
