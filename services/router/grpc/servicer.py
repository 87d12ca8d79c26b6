"""Serves the router's public gRPC API; the HTTP API calls the same methods."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from quire.kvindex.block_hash import CacheScope
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.errors import (
    ADAPTER_NOT_LOADED,
    RETRY_AFTER_SECONDS,
    FailedPrecondition,
    InvalidArgument,
    NoWorker,
)
from quire.rpc.health import READY, STOPPING, Health
from quire.services.requests.embeddings import validate_embeddings
from quire.services.requests.prompts import check_detokenized, check_size, encode_chat, encode_text
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import Answers, ValidRequest, answers_of, find_adapter, validate
from quire.services.router.execution.cluster import Cluster
from quire.services.router.execution.embedding import EmbeddingRun, run_all
from quire.services.router.execution.failures import deadline_exceeded
from quire.services.router.execution.generation import GenerationRun
from quire.services.router.execution.session_end import end_session
from quire.services.router.grpc.batch import batch_answers, check_batch_size
from quire.services.router.grpc.open_calls import OpenCalls
from quire.services.router.grpc.request_times import RequestTimes
from quire.services.router.metrics.metrics import Instruments
from quire.services.router.outputs.answer_size import (
    PromptLogprobs,
    all_of,
    check_answer_size,
    check_message_size,
)
from quire.services.router.outputs.dividing_decoder import joined
from quire.services.router.tenants.admission import Admission
from quire.services.router.tenants.api_keys import CALLER, Authenticator, Headers, Tenant
from quire.services.router.tenants.session_name import check_session_name, session_name
from quire.services.router.workers.queue import shown
from quire.services.server.phases import Phase, RequestPhases

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(pb_grpc.GenerationServiceServicer):
    """Serves ``GenerationService``.

    Args:
        cluster: resolves once the first worker has described its model.
        request_timeout_seconds: longest deadline of a request.
        worker_wait_seconds: longest time that a request waits for the first worker to join.
    """

    def __init__(
        self,
        cluster: asyncio.Future[Cluster],
        instruments: Instruments,
        authenticator: Authenticator,
        admission: Admission,
        *,
        request_timeout_seconds: float,
        worker_wait_seconds: float,
    ) -> None:
        self._cluster = cluster
        self._metrics, self._tracer, self._clock = instruments
        self._authenticator = authenticator
        self._admission = admission
        self.calls = OpenCalls()
        self._request_timeout_seconds = request_timeout_seconds
        self._worker_wait_seconds = worker_wait_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """Generate all answers and return them in one message."""
        headers = context.invocation_metadata()
        async with self.calls.entered():
            return await self._whole(request.generation, CALLER.get(), self._deadline(context), headers)

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Generate all answers and yield their tokens as they arrive."""
        tenant, deadline = CALLER.get(), self._deadline(context)
        headers = context.invocation_metadata()
        answer = self.generate(request.generation, tenant, deadline, headers)
        async with self.calls.entered(), aclosing(answer) as responses:
            async for response in responses:
                check_message_size(response)
                yield response

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Any
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        """Run all generations, a limited number at a time, and yield each result when it is complete."""
        tenant, deadline = CALLER.get(), self._deadline(context)
        check_batch_size(len(request.generations))
        answers = batch_answers(
            request.generations,
            lambda generation: self._whole(generation, tenant, deadline, context.invocation_metadata()),
            self.places(tenant, request.generations),
        )
        async with self.calls.entered(), aclosing(answers):
            async for answer in answers:
                yield answer

    async def _whole(
        self, generation: pb.Generation, tenant: Tenant, deadline: float, headers: Headers
    ) -> pb.GenerateResponse:
        if generation.received:
            raise InvalidArgument(
                "received", "must be empty but in GenerateStream, which sends only the rest"
            )
        check_answer_size([generation], (await self.joined_model(tenant)).max_model_len)
        async with aclosing(self.generate(generation, tenant, deadline, headers)) as responses:
            received = await all_of(responses)
        return await asyncio.to_thread(collected, received)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation.

        The call counts as a request for admission, because a long text takes seconds.
        """
        deadline = self._deadline(context)
        async with self.calls.entered(), self._admission.admitted(CALLER.get(), deadline):
            model = (await self.joined_cluster(deadline)).model
            if request.WhichOneof("prompt") == "chat":
                return pb.TokenizeResponse(token_ids=await encode_chat(request.chat, model))
            return pb.TokenizeResponse(token_ids=await encode_text(request.text, model))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """Return the text of token ids; the call counts as a request for admission."""
        deadline = self._deadline(context)
        async with self.calls.entered(), self._admission.admitted(CALLER.get(), deadline):
            model = (await self.joined_cluster(deadline)).model
            return await asyncio.to_thread(_detokenized, request, model)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Return the model's name and limits, and the number of live workers of each role."""
        cluster = await self.joined_cluster(self._deadline(context))
        return pb.GetModelInfoResponse(
            model=cluster.model.name,
            max_model_len=cluster.model.max_model_len,
            vocab_size=cluster.model.vocab_size,
            eos_token_ids=sorted(cluster.model.eos_token_ids),
            block_size=cluster.model.block_size,
            sampling_defaults=cluster.model.sampling_defaults,
            num_prefill_workers=len(cluster.workers.live("prefill")),
            num_decode_workers=len(cluster.workers.live("decode")),
            adapters=sorted(cluster.model.adapters()),
        )

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:
        """Return the embeddings of all texts in one message."""
        headers = context.invocation_metadata()
        async with self.calls.entered():
            return await self.embed(request, CALLER.get(), self._deadline(context), headers)

    async def EndSession(self, request: pb.EndSessionRequest, context: Any) -> pb.EndSessionResponse:
        """Drop the blocks of a session; the call counts as a request for admission."""
        async with self.calls.entered():
            return await self.end_session(request, CALLER.get(), self._deadline(context))

    async def end_session(
        self, request: pb.EndSessionRequest, tenant: Tenant, deadline: float
    ) -> pb.EndSessionResponse:
        """Drop the blocks of a tenant's session, for gRPC and HTTP alike.

        Raises:
            InvalidArgument: the name cannot be one of a session.
        """
        check_session_name(request.session)
        async with self._admission.admitted(tenant, deadline):
            cluster = await self.joined_cluster(deadline)
            return pb.EndSessionResponse(num_blocks=await end_session(cluster, tenant.name, request.session))

    def health(self) -> Health:
        """Return whether a request could be served now; all probes tell this.

        Without a prefill worker it can be, since decode workers compute prompts too.
        """
        if self.calls.is_stopping:
            return STOPPING
        (waiting,) = self._metrics.requests_waiting.collect()
        num_waiting = int(waiting.samples[0].value)
        problem: str | None = "no worker has joined yet"
        if self._cluster.done():
            workers = self._cluster.result().workers
            problem, num_waiting = workers.decode_problem(), num_waiting + workers.num_held()
        if problem is None:
            return READY
        if num_waiting:
            waits = "1 request waits" if num_waiting == 1 else f"{num_waiting} requests wait"
            return Health("stalled", f"{problem}; {waits}")
        return Health("not_ready", problem)

    async def generate(
        self,
        generation: pb.Generation,
        tenant: Tenant,
        deadline: float,
        headers: Headers = (),
        checked: Callable[[ValidRequest], None] | None = None,
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Admit a tenant's request and yield the messages of its answers, for gRPC and HTTP alike.

        Args:
            deadline: a reading of the clock.
            headers: headers of the call, which may contain a trace id and the name of the session.
            checked: is called once the request is validated; None: checks the size of its prompt logprobs.

        Raises:
            ServiceError: the request cannot be served or cannot be completed.
        """
        timer = RequestTimes(self._metrics, self._clock)
        with self._tracer.span("request", headers) as span, timer.watching():
            tenant.check_priority(generation.priority)
            answers = answers_of(generation.sampling)
            async with self._admission.admitted(tenant, deadline, answers) as allowance:
                phases = RequestPhases(self._metrics.phases, span)
                admitted = self._clock()
                phases.record(Phase.ADMIT, timer.arrival, admitted)
                cluster = await self.joined_cluster(deadline)
                request = await validate(generation, cluster.model)
                tenant.check_may_use(generation.model or cluster.model.name)
                (checked or PromptLogprobs().add_request)(request)
                await allowance.spend_prompt(request.num_input_tokens)
                phases.record(Phase.TOKENIZE, admitted, self._clock())
                self._metrics.prompt_tokens.inc(request.num_input_tokens)
                self._metrics.request_prompt_tokens.observe(request.num_input_tokens)
                session = session_name(headers, generation.session)

                def start(request: ValidRequest) -> GenerationRun:
                    run = GenerationRun(
                        cluster,
                        request,
                        CacheScope(tenant.name, request.cache_salt, request.adapter),
                        deadline,
                        phases,
                        session=session,
                        arrival=timer.arrival,
                        spend=allowance.spend,
                        weight=tenant.weight,
                    )
                    timer.describe(request.request_id, tenant.name, run.usage, span)
                    return run

                stream = _with_loaded_adapter(start, request, generation.model, cluster.model)
                async with aclosing(stream) as responses:
                    async for response in responses:
                        timer.sent(response)
                        yield response

    async def embed(
        self,
        request: pb.EmbedRequest,
        tenant: Tenant,
        deadline: float,
        headers: Headers = (),
        fields: Sequence[str] = (),
    ) -> pb.EmbedResponse:
        """Return the embeddings of a tenant's texts, for gRPC and HTTP alike; see ``generate``.

        The request takes as many places as texts run at a time, and is charged all its tokens at once. Errors
        name the inputs by ``fields``, if there are any.
        """
        timer, metrics = RequestTimes(self._metrics, self._clock), self._metrics
        num_at_once = max(1, min(len(request.inputs), self._admission.num_at_once(tenant, 1)))
        admission = self._admission.admitted(tenant, deadline, Answers(num_at_once, "inputs"))
        with self._tracer.span("request", headers) as span, timer.watching():
            async with admission as allowance:
                phases = RequestPhases(None, span)
                admitted = self._clock()
                phases.record(Phase.ADMIT, timer.arrival, admitted)
                cluster = await self.joined_cluster(deadline)
                texts = await validate_embeddings(request, cluster.model, fields)
                tenant.check_may_use(request.model or cluster.model.name)
                usage = pb.Usage(prompt_tokens=sum(len(text.prompt_token_ids) for text in texts))
                await allowance.spend_prompt(usage.prompt_tokens)
                phases.record(Phase.TOKENIZE, admitted, self._clock())
                metrics.prompt_tokens.inc(usage.prompt_tokens)
                metrics.request_prompt_tokens.observe(usage.prompt_tokens)
                scope = CacheScope(tenant.name, request.cache_salt, texts[0].adapter)
                make = partial(
                    EmbeddingRun,
                    arrival=timer.arrival,
                    spend=allowance.spend,
                    session="",
                    weight=tenant.weight,
                )
                runs = [make(cluster, text, scope, deadline, phases) for text in texts]
                name = texts[0].request_id
                timer.describe(name, tenant.name, usage, span)
                found = await run_all(runs, request.dimensions, num_at_once)
                for count in ("cached_prompt_tokens", "retries", "blocks_pulled", "bytes_pulled"):
                    setattr(usage, count, sum(getattr(run.usage, count) for run in runs))
                timer.embedded()
                embeddings = [pb.Embedding(values=found[at]) for at in range(len(runs))]
                return pb.EmbedResponse(embeddings=embeddings, usage=usage, request_id=name)

    def tenant_of(self, headers: Headers) -> Tenant:
        """Return the tenant of a request, from its gRPC metadata or HTTP headers.

        Raises:
            Unauthenticated: the headers carry no valid key.
        """
        return self._authenticator.authenticate(headers)

    def deadline(self, timeout_seconds: float = math.inf) -> float:
        """Return the deadline, a reading of the clock, of a request that begins now."""
        return self._clock() + min(timeout_seconds, self._request_timeout_seconds)

    def admitted(self, tenant: Tenant) -> AbstractAsyncContextManager[object]:
        """Count work other than a generation as one request for admission, until the context ends."""
        return self._admission.admitted(tenant, self.deadline())

    def places(self, tenant: Tenant, generations: Sequence[pb.Generation]) -> asyncio.Semaphore:
        """Return a semaphore that limits how many generations of one call run at once.

        The limit is low enough that admission does not refuse one generation because of the others.
        """
        num_answers = max(answers_of(each.sampling).number for each in generations)
        return asyncio.Semaphore(self._admission.num_at_once(tenant, num_answers))

    def _deadline(self, context: Any) -> float:
        return self.deadline(_remaining_seconds(context))

    async def joined_model(self, tenant: Tenant) -> ServedModel:
        """Return the served model; a request that waits for the first worker counts as running meanwhile."""
        if self._cluster.done():
            return self._cluster.result().model
        deadline = self.deadline()
        async with self._admission.admitted(tenant, deadline):
            return (await self.joined_cluster(deadline)).model

    @property
    def cluster(self) -> Cluster | None:
        """The cluster; None until a worker has joined."""
        return self._cluster.result() if self._cluster.done() else None

    async def joined_cluster(self, deadline: float = math.inf) -> Cluster:
        """Return the cluster, after waiting up to ``worker_wait_seconds`` if no worker has ever joined.

        Args:
            deadline: a reading of the clock.

        Raises:
            NoWorker: no worker joined in that time.
            DeadlineExceeded: the deadline passed first.
        """
        if self._cluster.done():
            return self._cluster.result()
        remaining = deadline - self._clock()
        try:
            async with (
                shown(self._metrics.requests_waiting),
                asyncio.timeout(max(0.0, min(self._worker_wait_seconds, remaining))),
            ):
                return await asyncio.shield(self._cluster)
        except TimeoutError:
            raise (deadline_exceeded(0) if remaining < self._worker_wait_seconds else _no_worker()) from None


def _detokenized(request: pb.DetokenizeRequest, model: ServedModel) -> pb.DetokenizeResponse:
    check_detokenized(request.token_ids, model, "token_ids")
    text = model.tokenizer.decode(list(request.token_ids))
    check_size(text, "token_ids")
    return pb.DetokenizeResponse(text=text)


def collected(responses: Sequence[pb.GenerateStreamResponse]) -> pb.GenerateResponse:
    """Return one response with all that the messages of a request's stream contain."""
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
        max_tokens=first.max_tokens if first.HasField("max_tokens") else None,
    )


def _no_worker() -> NoWorker:
    return NoWorker(
        "no worker has joined yet; start prefill and decode workers, or try again",
        reason="NO_WORKER",
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def _choice(responses: Sequence[pb.GenerateStreamResponse]) -> pb.Choice:
    """Return one choice with all that the messages of one answer contain."""
    last = responses[-1]
    choice = pb.Choice(
        index=last.index,
        text="".join(response.text for response in responses),
        finish_reason=last.finish_reason,
        score=last.score if last.HasField("score") else None,
        pieces=joined(piece for response in responses for piece in response.pieces),
        stop_string=last.stop_string,
    )
    # Extend once per message: one large operation would hold the GIL and block the event loop.
    for response in responses:
        choice.token_ids.extend(response.token_ids)
        choice.logprobs.MergeFrom(response.logprobs)
    return choice


def _remaining_seconds(context: Any) -> float:
    remaining = context.time_remaining()
    return math.inf if remaining is None else float(remaining)


async def _with_loaded_adapter(
    start: Callable[[ValidRequest], GenerationRun], request: ValidRequest, name: str, model: ServedModel
) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    """Yield the messages of a request; it begins again if its adapter gets other weights while it waits."""
    has_begun = bool(request.received)
    while True:
        try:
            async with aclosing(start(request).stream()) as responses:
                async for response in responses:
                    has_begun = True
                    yield response
            return
        except FailedPrecondition as error:
            if has_begun or error.reason != ADAPTER_NOT_LOADED:
                raise
            digest = find_adapter(name, model)
            if digest == request.adapter:
                raise
            request = replace(request, adapter=digest)
