"""Workers behind gateways that drive vLLM's engines: a client of the proto, and a gateway of others."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from quire.models.notes import held_out
from quire.models.source import demo_model_path
from quire.protos import worker_pb2
from quire.services.local.stack import RunningStack
from quire.services.server.process import free_port
from quire.services.vllm_adapter.hand_off import hand_off
from tests.testing.rpc_errors import error_of
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle

WAIT_SECONDS = 30.0
GATEWAY_SECONDS = 60.0
LENGTH, NUM_NEW = 400, 64
CONTEXT = 32_768
ENDLESS = 32_000
"""Tokens of answers that only an abort ends."""
NUM_CHATS = 8
NUM_FULL = (LENGTH - 1) // 16
TAGS = json.dumps({"do_remote_decode": True, "do_remote_prefill": False})
BLOCKS = "quire_kv_transfer_blocks_total"
_names = count()


@pytest.fixture(scope="module")
def cluster(start_stack: StartStack, tiny_model: Callable[..., Path]) -> Iterator[RunningStack]:
    """Run a prefill and a decode worker of a tiny Llama with a long context."""
    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    with start_stack("llama", vllm_grpc=True, model=str(model)) as running:
        yield running


@pytest.fixture
async def engines(cluster: RunningStack) -> AsyncIterator[dict[str, VllmEngineStub]]:
    """Return a stub of each worker."""
    channels = {name: grpc.aio.insecure_channel(worker.address) for name, worker in cluster.ready.items()}
    yield {name: VllmEngineStub(channel) for name, channel in channels.items()}
    for channel in channels.values():
        await channel.close(None)


def request(prompt: list[int], params: dict[str, Any] | None = None, **fields: Any) -> vllm.GenerateRequest:
    values = {"temperature": 0.0, "max_tokens": NUM_NEW, "ignore_eos": True, **(params or {})}
    return vllm.GenerateRequest(
        request_id=fields.pop("request_id", f"vllm-{next(_names)}"),
        tokenized=vllm.TokenizedInput(input_ids=prompt),
        sampling_params=vllm.SamplingParams(**values),
        **fields,
    )


async def answers(stub: Any, message: vllm.GenerateRequest) -> list[vllm.GenerateResponse]:
    return [response async for response in stub.Generate(message, timeout=WAIT_SECONDS)]


async def complete(stub: Any, message: vllm.GenerateRequest) -> vllm.GenerateComplete:
    """Return the one message of an answer that is not streamed."""
    [response] = await answers(stub, message)
    return response.complete


async def refusal(stub: Any, message: vllm.GenerateRequest) -> str:
    caught = await error_of(answers(stub, message), grpc.StatusCode.INVALID_ARGUMENT)
    return str(caught.details())


# --- a client of the proto ----------------------------------------------------------------------------------


async def test_a_decode_worker_answers_by_itself(
    cluster: RunningStack, engines: dict[str, Any], expected: Any
) -> None:
    prompt = make_prompt(LENGTH, seed=70)
    answer = await complete(engines["decode-0"], request(prompt))
    assert list(answer.output_ids) == expected("llama", prompt)
    assert (answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (
        "length",
        LENGTH,
        NUM_NEW,
    )
    assert (answer.cached_tokens, answer.kv_transfer_params_json) == (0, "")


async def test_a_stream_has_each_token_once_and_the_whole_at_its_end(
    cluster: RunningStack, engines: dict[str, Any], expected: Any
) -> None:
    prompt = make_prompt(LENGTH, seed=71)
    *chunks, last = await answers(engines["decode-0"], request(prompt, stream=True))
    tokens = [token_id for response in chunks for token_id in response.chunk.token_ids]
    assert tokens == list(last.complete.output_ids) == expected("llama", prompt)
    assert sum(response.chunk.completion_tokens for response in chunks) == NUM_NEW
    assert len(chunks) > 1


@pytest.mark.parametrize("tags", [{}, {"kv_transfer_params_json": TAGS}])
async def test_a_decode_worker_pulls_what_the_prefill_worker_computed(
    tags: dict[str, str], cluster: RunningStack, engines: dict[str, Any], expected: Any
) -> None:
    prompt = make_prompt(LENGTH, seed=72 + len(tags))
    lent, pulled = (
        metric(cluster, "prefill-0", BLOCKS, direction="lent"),
        metric(cluster, "decode-0", BLOCKS, direction="pulled"),
    )
    first = await complete(engines["prefill-0"], request(prompt, {"max_tokens": 1}, **tags))
    assert list(first.output_ids) == expected("llama", prompt)[:1]
    answer = await complete(
        engines["decode-0"], request(prompt, kv_transfer_params_json=first.kv_transfer_params_json)
    )
    assert list(answer.output_ids) == expected("llama", prompt)
    assert (first.cached_tokens, answer.cached_tokens) == (0, 0), "all was computed for this request"
    assert metric(cluster, "prefill-0", BLOCKS, direction="lent") - lent == NUM_FULL
    assert metric(cluster, "decode-0", BLOCKS, direction="pulled") - pulled == NUM_FULL
    again = await complete(engines["prefill-0"], request(prompt, {"max_tokens": 1}, **tags))
    both = await complete(
        engines["decode-0"], request(prompt, kv_transfer_params_json=again.kv_transfer_params_json)
    )
    assert again.cached_tokens == both.cached_tokens == LENGTH - 1
    async with connect(cluster) as (_, workers):
        await wait_until_idle(workers)


@pytest.mark.parametrize("change", [{"epoch": "of before"}, {"address": "127.0.0.1:1"}])
async def test_blocks_that_cannot_be_pulled_are_computed(
    change: dict[str, Any], cluster: RunningStack, engines: dict[str, Any], expected: Any
) -> None:
    prompt = make_prompt(LENGTH, seed=80 + len(next(iter(change))))
    await complete(engines["prefill-0"], request(prompt, {"max_tokens": 1}))
    holder = cluster.ready["prefill-0"]
    said = {"address": holder.address, "epoch": holder.epoch, "num_blocks": NUM_FULL, **change}
    stale = hand_off(**said, secret=cluster.caller.secret)
    answer = await complete(engines["decode-0"], request(prompt, kv_transfer_params_json=stale))
    assert list(answer.output_ids) == expected("llama", prompt)
    assert answer.cached_tokens == 0


async def test_several_answers_and_logprobs(engines: dict[str, Any]) -> None:
    prompt = make_prompt(40, seed=90)
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "n": 2, "logprobs": 2, "prompt_logprobs": 1}
    responses = await answers(engines["decode-0"], request(prompt, params))
    first, second = sorted((response.complete for response in responses), key=lambda each: each.index)
    again = await complete(engines["decode-0"], request(prompt, {**params, "n": 1, "seed": 4}))
    assert second.output_ids == again.output_ids != first.output_ids
    for answer in (first, second):
        drawn, given = answer.output_logprobs, answer.input_logprobs
        assert list(drawn.token_ids) == list(answer.output_ids)
        assert len(drawn.token_logprobs) == 8
        assert all(len(top.values) == len(top.token_ids) == 2 for top in drawn.top_logprobs)
        assert list(given.token_ids) == prompt
        assert [value.HasField("value") for value in given.token_logprobs] == [False] + [True] * 39
        assert [len(top.values) for top in given.top_logprobs] == [0] + [1] * 39


async def test_stops_are_named(cluster: RunningStack, engines: dict[str, Any], expected: Any) -> None:
    prompt = make_prompt(LENGTH, seed=70)
    tokens = expected("llama", prompt)
    stop_token = next(token for token in tokens[3:] if token not in tokens[:3])
    at = tokens.index(stop_token)
    answer = await complete(engines["decode-0"], request(prompt, {"stop_token_ids": [stop_token]}))
    assert list(answer.output_ids) == tokens[: at + 1]
    assert (answer.finish_reason, answer.matched_token_id) == ("stop", stop_token)
    async with connect(cluster) as (client, _):
        text = await client.detokenize(tokens)
        stop = next(char for char in text if char.isascii() and char.isalnum())
        answer = await complete(engines["decode-0"], request(prompt, {"stop": [stop]}))
        assert list(answer.output_ids) == tokens[: len(answer.output_ids)]
        assert stop in await client.detokenize(list(answer.output_ids))
        assert stop not in await client.detokenize(list(answer.output_ids)[:-1])
        assert (answer.finish_reason, answer.matched_stop_str) == ("stop", stop)


async def test_an_abort_ends_the_streams_and_frees_the_blocks(
    cluster: RunningStack, engines: dict[str, Any]
) -> None:
    decode = engines["decode-0"]

    async def abort(seed: int) -> None:
        message = request(make_prompt(40, seed=seed), {"max_tokens": ENDLESS}, stream=True)
        stream = aiter(decode.Generate(message, timeout=WAIT_SECONDS))
        assert (await anext(stream)).HasField("chunk")
        await decode.Abort(vllm.AbortRequest(request_ids=[message.request_id, "unknown"]))
        await error_of(stream, grpc.StatusCode.ABORTED)

    await asyncio.gather(*(abort(seed) for seed in range(91, 99)))
    async with connect(cluster) as (_, workers):
        await wait_until_idle(workers)


async def test_bad_requests_name_the_field(engines: dict[str, Any]) -> None:
    prefill, decode = engines["prefill-0"], engines["decode-0"]
    assert "max_tokens: must be 1" in await refusal(prefill, request([5, 6]))
    assert "n: must be 1" in await refusal(prefill, request([5, 6], {"max_tokens": 1, "n": 2}))
    from_decode = json.dumps(
        {
            "do_remote_prefill": True,
            "remote_host": "h",
            "remote_port": 1,
            "remote_engine_id": "e",
            "remote_num_blocks": 1,
        }
    )
    message = request([5, 6], {"max_tokens": 1}, kv_transfer_params_json=from_decode)
    assert "for a decode worker" in await refusal(prefill, message)
    assert "tokenized.input_ids[0]" in await refusal(decode, request([1 << 20]))


async def test_workers_describe_themselves(cluster: RunningStack, engines: dict[str, Any]) -> None:
    prefill, decode = engines["prefill-0"], engines["decode-0"]
    model = await decode.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (CONTEXT, 320, [1])
    assert (model.model_type, model.is_generation) == ("llama", True)
    p, d = [await stub.GetServerInfo(vllm.GetServerInfoRequest()) for stub in (prefill, decode)]
    assert (p.kv_role, d.kv_role) == ("kv_producer", "kv_consumer")
    assert p.pairing_protocol == d.pairing_protocol != ""
    assert p.kv_engine_id != d.kv_engine_id
    [load] = (await decode.GetLoads(vllm.GetLoadsRequest())).loads
    assert (load.num_total_reqs, load.max_total_num_tokens, load.max_running_requests) == (0, 2048 * 16, 64)
    assert (await prefill.FlushCache(common_pb2.FlushCacheRequest())).success
    assert [chunk async for chunk in decode.GetTokenizer(common_pb2.GetTokenizerRequest())]


async def test_a_draining_worker_is_not_healthy(cluster: RunningStack, engines: dict[str, Any]) -> None:
    async def is_healthy() -> bool:
        return bool((await engines["decode-0"].HealthCheck(vllm.HealthCheckRequest())).healthy)

    async with connect(cluster) as (_, workers):
        assert await is_healthy()
        await workers["decode-0"].SetDraining(worker_pb2.SetDrainingRequest(is_draining=True))
        assert not await is_healthy()
        await workers["decode-0"].SetDraining(worker_pb2.SetDrainingRequest(is_draining=False))
        assert await is_healthy()


async def test_a_subscriber_gets_each_change_of_the_load(
    cluster: RunningStack, engines: dict[str, Any]
) -> None:
    decode = engines["decode-0"]
    async with asyncio.timeout(WAIT_SECONDS), connect(cluster) as (_, workers):
        await wait_until_idle(workers)
        call = decode.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        events = aiter(call)
        first = await anext(events)
        assert (first.sequence_number, list(first.events), first.load.load_only) == (0, [], False)
        assert (first.load.running_requests, first.load.token_usage) == (0, 0.0)
        assert first.load.max_running_requests == 64

        async def keep_busy() -> None:
            while True:
                await answers(decode, request(make_prompt(40, seed=92), {"max_tokens": 450}))

        busy = asyncio.create_task(keep_busy())
        later = await anext(events)
        while not later.load.running_requests:
            later = await anext(events)
        assert (later.sequence_number, list(later.events), later.load.load_only) == (0, [], True)
        assert later.load.sample > first.load.sample
        assert later.load.running_requests == 1
        assert later.load.token_usage > 0
        busy.cancel()
        call.cancel()


async def test_a_subscriber_with_a_history_begins_again(engines: dict[str, Any]) -> None:
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=7)
    await error_of(engines["decode-0"].SubscribeKvEvents(request).read(), grpc.StatusCode.OUT_OF_RANGE)


async def test_unsupported_calls_are_unimplemented(engines: dict[str, Any]) -> None:
    calls = [
        engines["decode-0"].Embed(vllm.EmbedRequest()),
        engines["decode-0"].StartProfile(common_pb2.StartProfileRequest()),
        engines["decode-0"].StopProfile(common_pb2.StopProfileRequest()),
    ]
    for call in calls:
        await error_of(call, grpc.StatusCode.UNIMPLEMENTED)


# --- a gateway of others ------------------------------------------------------------------------------------

needs_smg = pytest.mark.skipif(
    find_spec("smg") is None,
    reason="the gateway smg, of the group dev, is not installed (it has no wheel here)",
)


class Gateway(NamedTuple):
    """A running gateway."""

    url: str
    log: Path

    def chat(self, messages: Any, **fields: Any) -> bytes:
        """Ask, and return the body of the answer."""
        values = {"model": "demo", "messages": messages, "temperature": 0.0, "max_tokens": 32, **fields}
        headers = {"content-type": "application/json"}
        question = Request(f"{self.url}/v1/chat/completions", json.dumps(values).encode(), headers)
        try:
            with urlopen(question, timeout=WAIT_SECONDS) as response:
                body: bytes = response.read()
        except HTTPError as error:
            pytest.fail(f"{error}: {error.read()!r}\n{self.log.read_text(errors='replace')[-4000:]}")
        return body

    def stream(self, messages: Any, **fields: Any) -> list[str]:
        """Ask, and return the parts of the streamed answer's text."""
        *events, done, _ = self.chat(messages, stream=True, **fields).decode().split("\n\n")
        assert done == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]

    def is_ready(self, num_workers: int) -> bool:
        """Return whether it would use this many workers and has loaded their tokenizer."""
        try:
            workers, tokenizers = self._get("/workers")["workers"], self._get("/v1/tokenizers")["tokenizers"]
        except URLError:
            return False
        has_tokenizer = any(tokenizer["name"] == "demo" for tokenizer in tokenizers)
        return has_tokenizer and sum(worker["is_healthy"] for worker in workers) >= num_workers

    def _get(self, path: str) -> Any:
        with urlopen(f"{self.url}{path}", timeout=WAIT_SECONDS) as response:
            return json.load(response)


@contextmanager
def gateway(log: Path, num_workers: int, *arguments: str) -> Iterator[Gateway]:
    """Run the gateway until the context ends; wait until it would use its workers."""
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port), *arguments]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--worker-startup-check-interval", "1"]
    # By default it turns away from a worker that says nothing for 2 s, as any may on a busy machine.
    command += ["--worker-stall-secs", "30", "--worker-wedge-secs", "30"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        running = Gateway(f"http://127.0.0.1:{port}", log)
        deadline = time.monotonic() + GATEWAY_SECONDS
        while not running.is_ready(num_workers):
            told = log.read_text(errors="replace")[-4000:]
            assert process.poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(0.05)
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def demo(start_stack: StartStack) -> Iterator[RunningStack]:
    """Run a prefill and a decode worker of the demo model."""
    with start_stack("llama", model=None, dtype="auto", vllm_grpc=True) as running:
        yield running


@needs_smg
def test_smg_drives_a_decode_worker(demo: RunningStack, tmp_path: Path) -> None:
    [example] = held_out(1, 20)
    address = demo.ready["decode-0"].address
    # It has no folder of the model: the worker sends it the tokenizer.
    with gateway(tmp_path / "log", 1, "--worker-urls", f"grpc://{address}") as smg:
        answer = json.loads(smg.chat(example.messages))
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (example.expected, "stop")


@needs_smg
def test_smg_drives_a_prefill_and_a_decode_worker(demo: RunningStack, tmp_path: Path) -> None:
    plain, streamed, shaped, *many = held_out(3 + NUM_CHATS, 20, seed=1)
    urls = {name: f"grpc://{worker.address}" for name, worker in demo.ready.items()}
    roles = ["--pd-disaggregation", "--prefill", urls["prefill-0"], "--decode", urls["decode-0"]]
    lent = metric(demo, "prefill-0", BLOCKS, direction="lent")
    pulled = metric(demo, "decode-0", BLOCKS, direction="pulled")
    with gateway(tmp_path / "log", 2, *roles, "--model-path", str(demo_model_path())) as smg:
        answer = json.loads(smg.chat(plain.messages))
        assert answer["choices"][0]["message"]["content"] == plain.expected
        num_blocks = (answer["usage"]["prompt_tokens"] - 1) // 16
        assert num_blocks > 5
        assert metric(demo, "decode-0", BLOCKS, direction="pulled") - pulled == num_blocks
        assert metric(demo, "prefill-0", BLOCKS, direction="lent") - lent == num_blocks

        assert "".join(smg.stream(streamed.messages)) == streamed.expected
        long = smg.stream(streamed.messages, max_tokens=300, ignore_eos=True)
        assert "".join(long).startswith(streamed.expected)
        assert len(long) > 3

        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
        answer = json.loads(smg.chat(shaped.messages, response_format=shape))
        assert json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")

        with ThreadPoolExecutor(NUM_CHATS) as pool:
            answered = [json.loads(body) for body in pool.map(smg.chat, [each.messages for each in many])]
    texts = [answer["choices"][0]["message"]["content"] for answer in answered]
    assert texts == [each.expected for each in many]
