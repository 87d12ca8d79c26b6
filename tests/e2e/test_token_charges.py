"""A tenant is charged what the workers computed, however it made them compute, and every count is true."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from quire.client import AsyncClient
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.routing.placement import PolicyConfig
from quire.services.local.stack import RunningStack
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.token_bucket import TokenBucket
from tests.testing.api_keys import write_keys
from tests.testing.stacks import connect, make_prompt, metric, wait_until_idle
from tests.testing.until import until

LENGTH, NUM_NEW, MANY = 40, 12, 400
SECONDS = 20.0
SHORT = 15
"""Length of a prompt without a full block, of which nothing is cached."""
_seeds = count(1000)

RAN = "quire_step_tokens_sum"
PROMPTS, ANSWERS, CACHED = (
    f"quire_{name}_total" for name in ("prompt_tokens", "generation_tokens", "prompt_tokens_cached")
)


@dataclass
class Meter:
    """A router with one tenant in front of real workers, and what is counted on both sides."""

    stack: RunningStack
    running: RunningRouter
    key: str
    stub: pb_grpc.GenerationServiceStub
    client: AsyncClient
    http: aiohttp.ClientSession
    charges: list[int] = field(default_factory=list)
    ran_before: float = 0.0

    @property
    def charged(self) -> int:
        return sum(self.charges)

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.key}"),)

    @property
    def model(self) -> str:
        return self.running.workers.live("decode")[0].info.model

    def counted(self, name: str) -> float:
        """Return a counter of the router."""
        return self.running.metrics.registry.get_sample_value(name) or 0.0

    def ran(self) -> float:
        """Return how many tokens the workers' models have run."""
        return sum(metric(self.stack, name, RAN) for name in self.stack.ready)

    async def begin(self) -> None:
        """Count from now on, once no worker has anything left to do."""
        async with connect(self.stack) as (_, workers):
            await wait_until_idle(workers)
        self.charges.clear()
        self.ran_before = self.ran()

    async def until_charged(self, num_tokens: int) -> None:
        await until(lambda: self.charged >= num_tokens)

    async def not_run(self, expected: int) -> int:
        """Return how many charged tokens no model has run, once as ``expected`` or after SECONDS."""
        deadline = time.monotonic() + SECONDS
        async with connect(self.stack) as (_, workers):
            while True:
                await wait_until_idle(workers)
                rest = self.charged - int(self.ran() - self.ran_before)
                if rest == expected or time.monotonic() > deadline:
                    return rest
                await asyncio.sleep(0.02)

    def prompt(self, length: int = LENGTH) -> list[int]:
        """Return a prompt that no cache has."""
        return make_prompt(length, seed=next(_seeds))

    def request(self, prompt: list[int], **sampling: Any) -> pb.Generation:
        generation = pb.Generation(token_ids=pb.TokenIds(ids=prompt))
        generation.sampling.MergeFrom(pb.SamplingParams(seed=1, **sampling))
        generation.stopping.MergeFrom(pb.StoppingParams(max_tokens=NUM_NEW, ignore_eos=True))
        return generation

    async def stream(self, generation: pb.Generation) -> list[pb.GenerateStreamResponse]:
        call = self.stub.GenerateStream(
            pb.GenerateStreamRequest(generation=generation), metadata=self.headers
        )
        return [response async for response in call]

    async def post(self, **body: Any) -> dict[str, Any]:
        async with self.http.post("/v1/completions", json={"ignore_eos": True, **body}) as answer:
            assert answer.status == 200, await answer.text()
            read: dict[str, Any] = await answer.json()
            return read


@pytest.fixture
async def meter(
    request: Any, stack: RunningStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Meter]:
    file, [key] = write_keys(tmp_path, Tenant("acme", tokens_per_minute=10**9))
    config = RouterConfig(
        port=0,
        http_port=0,
        metrics_port=0,
        api_keys_file=file,
        worker_addresses=tuple(worker.address for worker in stack.ready.values()),
        cluster_secret=stack.caller.secret,
        placing=PolicyConfig(local_prefill_tokens=getattr(request, "param", 0)),
    )
    async with (
        router(config) as running,
        AsyncClient(running.address, api_key=key) as client,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        assert running.http is not None
        async with asyncio.timeout(SECONDS):
            while len(running.workers.live("decode") + running.workers.live("prefill")) < 2:
                await running.workers.refresh()
        await client.model_info()
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(f"http://{running.http.address}", headers=headers) as http:
            stub = pb_grpc.GenerationServiceStub(channel)
            meter = Meter(stack, running, key, stub, client, http)
            spend = TokenBucket.spend

            def spent(bucket: TokenBucket, num_tokens: int) -> None:
                meter.charges.append(num_tokens)
                spend(bucket, num_tokens)

            monkeypatch.setattr(TokenBucket, "spend", spent)
            yield meter


Way = Callable[[Meter], Awaitable[None]]


# --- every way to make a worker compute ---------------------------------------------------------------------


def asked(**options: Any) -> Way:
    async def way(meter: Meter) -> None:
        await meter.client.generate(meter.prompt(), max_tokens=NUM_NEW, ignore_eos=True, **options)

    return way


async def a_batch(meter: Meter) -> None:
    prompts = [meter.prompt() for _ in range(3)]
    async for _ in meter.client.batch(prompts, max_tokens=NUM_NEW, ignore_eos=True):
        pass


async def a_stop_string_in_one_of_two(meter: Meter) -> None:
    """The worker generates both answers to their ends, although the client gets only a part of one."""
    prompt = meter.prompt()
    options: dict[str, Any] = {"n": 2, "seed": 3, "max_tokens": NUM_NEW, "ignore_eos": True}
    text = (await meter.client.generate(prompt, **options)).choices[0].text
    await meter.begin()
    answer = await meter.client.generate(prompt, stop=[text[:1]], cache_salt="nothing cached", **options)
    assert answer.usage.completion_tokens < 2 * NUM_NEW


async def echo_of_several_prompts(meter: Meter) -> None:
    await meter.post(
        model=meter.model,
        prompt=[meter.prompt() for _ in range(2)],
        n=2,
        echo=True,
        max_tokens=NUM_NEW,
        logprobs=1,
    )


async def only_an_echo(meter: Meter) -> None:
    await meter.post(model=meter.model, prompt=meter.prompt(), echo=True, max_tokens=0, logprobs=1)


async def resumed(meter: Meter, length: int, received: list[list[int]], **response: Any) -> None:
    """Continue answers of which ``received`` came; the first message of any stream tells the origin."""
    origin = (await meter.stream(meter.request(meter.prompt())))[0].origin
    await meter.begin()
    generation = meter.request(meter.prompt(length), n=len(received))
    generation.stopping.max_tokens = NUM_NEW + max(map(len, received))
    generation.response.MergeFrom(pb.ResponseOptions(**response))
    generation.origin = origin
    for index, token_ids in enumerate(received):
        generation.received.add(index=index, token_ids=token_ids)
    await meter.stream(generation)


async def a_resumed_answer(meter: Meter) -> None:
    await resumed(meter, LENGTH, [meter.prompt(100)])


async def resumed_answers_of_a_short_prompt(meter: Meter) -> None:
    """Each computes the prompt for itself, since it has no block that they could share."""
    await resumed(meter, SHORT, [[2], [], [], [], []])


async def resumed_prompt_logprobs(meter: Meter) -> None:
    """Logprobs would keep the answers from sharing the prompt, and the client has them already."""
    await resumed(meter, SHORT, [[2], [3, 4]], prompt_logprobs=1)


# With the number of sequences, whose last tokens no model runs.
WAYS: dict[str, tuple[Way, int]] = {
    "one answer": (asked(), 1),
    "several answers": (asked(n=3), 3),
    "best_of": (asked(best_of=4), 4),
    "two of four": (asked(n=2, best_of=4), 4),
    "beams": (asked(beam_width=3), 3),
    "prompt logprobs": (asked(prompt_logprobs=2), 1),
    "a batch": (a_batch, 3),
    "a stop string in one of two": (a_stop_string_in_one_of_two, 2),
    "an echo of several prompts": (echo_of_several_prompts, 4),
    "only an echo": (only_an_echo, 1),
    "a resumed answer": (a_resumed_answer, 1),
    "resumed answers of a short prompt": (resumed_answers_of_a_short_prompt, 5),
    "resumed prompt logprobs": (resumed_prompt_logprobs, 2),
}


@pytest.mark.parametrize("meter", [0, 10_000], ids=["prefill apart", "prefill with decode"], indirect=True)
@pytest.mark.parametrize(("way", "num_sequences"), WAYS.values(), ids=WAYS)
async def test_the_charge_is_what_the_workers_computed(meter: Meter, way: Way, num_sequences: int) -> None:
    await meter.begin()
    await way(meter)
    assert await meter.not_run(num_sequences) == num_sequences


CLOSED: dict[str, tuple[dict[str, Any], int]] = {
    "a stream": ({}, 1),
    "two answers": ({"n": 2}, 2),
    "best_of": ({"best_of": 4}, 4),
    "beams": ({"beam_width": 4}, 4),
}


@pytest.mark.parametrize(("options", "num_sequences"), CLOSED.values(), ids=CLOSED)
async def test_a_client_that_closes_early_is_charged_the_generated_tokens(
    meter: Meter, options: dict[str, Any], num_sequences: int
) -> None:
    await meter.begin()
    running = asyncio.create_task(
        meter.client.generate(meter.prompt(), max_tokens=MANY, ignore_eos=True, **options)
    )
    # The client gets nothing before the end: the charge grows as the workers compute.
    await meter.until_charged(LENGTH + 80)
    running.cancel()
    await asyncio.wait([running])
    assert await meter.not_run(num_sequences) == num_sequences


async def test_a_reader_that_stops_reading_is_charged_as_it_goes(meter: Meter) -> None:
    await meter.begin()
    stream = meter.client.stream(meter.prompt(), n=4, max_tokens=MANY, ignore_eos=True)
    await anext(stream)
    await meter.until_charged(LENGTH + 4 * MANY)
    await stream.aclose()
    assert await meter.not_run(4) == 4


# --- what is reported ---------------------------------------------------------------------------------------


@dataclass
class Reported:
    """What one answer says of itself."""

    prompt: int
    answers: int
    cached: int


async def by_generate(meter: Meter, prompt: list[int], **options: Any) -> Reported:
    usage = (await meter.client.generate(prompt, max_tokens=NUM_NEW, ignore_eos=True, **options)).usage
    return Reported(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)


async def by_stream(meter: Meter, prompt: list[int], **options: Any) -> Reported:
    usage = (await meter.stream(meter.request(prompt, **options)))[-1].usage
    return Reported(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)


async def by_batch(meter: Meter, prompt: list[int], **options: Any) -> Reported:
    answers = meter.client.batch([prompt], max_tokens=NUM_NEW, ignore_eos=True, **options)
    [usage] = [answer.usage async for _, answer in answers]  # type: ignore[union-attr]
    return Reported(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)


def _over_http(usage: dict[str, Any]) -> Reported:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reported(usage["prompt_tokens"], usage["completion_tokens"], cached)


async def by_http(meter: Meter, prompt: list[int], **options: Any) -> Reported:
    return _over_http(
        (await meter.post(model=meter.model, prompt=prompt, max_tokens=NUM_NEW, **options))["usage"]
    )


async def by_http_stream(meter: Meter, prompt: list[int], **options: Any) -> Reported:
    body = {"model": meter.model, "prompt": prompt, "max_tokens": NUM_NEW, "ignore_eos": True, **options}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with meter.http.post("/v1/completions", json=body) as answer:
        events = [line[6:] async for line in answer.content if line.startswith(b"data: {")]
    return _over_http(json.loads(events[-1])["usage"])


@pytest.mark.parametrize("door", [by_generate, by_stream, by_batch, by_http, by_http_stream])
@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 2, "best_of": 3}], ids=str)
async def test_every_door_and_the_metrics_report_the_same_sums(
    meter: Meter, door: Callable[..., Awaitable[Reported]], options: dict[str, int]
) -> None:
    if door is by_http_stream and "best_of" in options:
        pytest.skip("best_of is not streamed over HTTP")
    prompt, num_sequences = meter.prompt(100), max(options.values(), default=1)
    await meter.begin()
    before = [meter.counted(name) for name in (PROMPTS, ANSWERS, CACHED)]
    reported = [await door(meter, prompt, **options) for _ in range(2)]
    new, again = reported
    assert new == Reported(len(prompt), num_sequences * NUM_NEW, 0)
    assert (again.prompt, again.answers) == (new.prompt, new.answers)
    assert 64 <= again.cached < again.prompt
    after = [meter.counted(name) for name in (PROMPTS, ANSWERS, CACHED)]
    sums = [sum(each.prompt for each in reported), sum(each.answers for each in reported), again.cached]
    assert [int(b - a) for a, b in zip(before, after, strict=True)] == sums
    assert meter.charged == sums[0] + sums[1]
    # What was cached is charged, but no model ran it.
    assert await meter.not_run(2 * num_sequences + again.cached) == 2 * num_sequences + again.cached


async def test_received_tokens_are_prompt_tokens_for_the_router_and_part_of_the_answer_for_the_client(
    meter: Meter,
) -> None:
    prompt = meter.prompt()
    first = await meter.stream(meter.request(prompt))
    tokens = [token_id for response in first for token_id in response.token_ids]
    before = [meter.counted(name) for name in (PROMPTS, ANSWERS)]
    generation = meter.request(prompt)
    generation.origin = first[0].origin
    generation.received.add(index=0, token_ids=tokens[:5])
    rest = await meter.stream(generation)
    assert [token_id for response in rest for token_id in response.token_ids] == tokens[5:]
    usage = rest[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (LENGTH, NUM_NEW)
    assert usage.cached_prompt_tokens <= usage.prompt_tokens
    after = [meter.counted(name) for name in (PROMPTS, ANSWERS)]
    assert [int(b - a) for a, b in zip(before, after, strict=True)] == [LENGTH + 5, NUM_NEW - 5]
