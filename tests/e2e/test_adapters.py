"""Adapters on a stack: each request gets the tokens of its own, wherever its blocks come from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import pytest

from quire.benchmarks.harness.random_adapters import make_adapter
from quire.client import AsyncClient, NotFound, QuireError
from quire.client.admin import AdminClient
from quire.engine.weights.adapters import load_adapter
from quire.engine.weights.loader import load_model
from quire.kvindex.block_hash import CacheScope, root_hash
from quire.protos import worker_pb2 as pb
from quire.services.local.stack import RunningStack
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from quire.services.router.tenants.api_keys import Tenant
from quire.services.worker.config import DiskFolder
from tests.testing.api_keys import write_keys
from tests.testing.decodes import decoding, make_sequence, prefill, pull_source
from tests.testing.stacks import GREEDY, StartStack, begin, connect, make_prompt, metric, wait_until_idle
from tests.testing.tiny_engine import CPU, make_engine, make_request, run_in_order
from tests.testing.until import until

NUM_NEW = 40
Expected = Callable[[int | None, tuple[int, ...]], list[int]]


class Adapters(NamedTuple):
    """Two adapters of the tiny Llama, and the model's tokens with one of them (by its index) or none."""

    paths: list[Path]
    digests: list[str]
    expected: Expected


@pytest.fixture(scope="module")
def adapters(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder, target = tiny_model("llama"), tmp_path_factory.mktemp("adapters")
    paths = [make_adapter(target / f"{seed}", folder, seed=seed, size=0.3) for seed in range(2)]
    model = load_model(str(folder), "float32", CPU)
    loaded = [load_adapter(str(path), model) for path in paths]

    @cache
    def expected(index: int | None, prompt: tuple[int, ...]) -> list[int]:
        request = make_request("a", list(prompt), max_tokens=NUM_NEW, temperature=0.0)
        if index is not None:
            request.adapter = loaded[index]
            request.root_hash = root_hash(b"", b"", CacheScope(adapter=loaded[index].digest))
        return run_in_order(make_engine(model), request)[0]

    return Adapters(paths, [each.digest for each in loaded], expected)


def flags(adapters: Adapters) -> tuple[str, ...]:
    return tuple(f"adapter-{index}={path}" for index, path in enumerate(adapters.paths))


@pytest.fixture(scope="module")
def cluster(start_stack: StartStack, adapters: Adapters) -> Iterator[RunningStack]:
    """Run a prefill and a decode worker with both adapters."""
    with start_stack("llama", lora=flags(adapters), http_port=0) as running:
        yield running


async def generate(client: AsyncClient, index: int | None, prompt: list[int], **options: Any) -> Any:
    """Ask for an answer with an adapter, by its index, or without one."""
    model = "" if index is None else f"adapter-{index}"
    return await client.generate(prompt, model=model, max_tokens=NUM_NEW, **{**GREEDY, **options})


async def test_both_adapters_and_the_model_share_batches(cluster: RunningStack, adapters: Adapters) -> None:
    async with connect(cluster) as (client, _):
        prompts = [make_prompt(length, seed=5) for length in (20, 90, 330)]
        asked = [(index, prompt) for prompt in prompts for index in (0, None, 1, 0)]
        Random(1).shuffle(asked)
        answers = await asyncio.gather(*(generate(client, *each) for each in asked))
        for (index, prompt), answer in zip(asked, answers, strict=True):
            assert list(answer.token_ids) == adapters.expected(index, tuple(prompt))
        assert len({tuple(adapters.expected(index, tuple(prompts[0]))) for index in (0, None, 1)}) == 3


async def test_a_cached_prefix_is_used_only_with_its_own_adapter(
    cluster: RunningStack, adapters: Adapters
) -> None:
    async with connect(cluster) as (client, workers):
        prompt = make_prompt(200, seed=6)
        for turn in range(2):
            for index in (0, None, 1):
                answer = await generate(client, index, prompt)
                assert list(answer.token_ids) == adapters.expected(index, tuple(prompt))
                assert answer.usage.cached_prompt_tokens // 16 == (12 if turn else 0)
                await wait_until_idle(workers)


async def test_a_pull_brings_only_blocks_of_the_same_adapter(
    cluster: RunningStack, adapters: Adapters
) -> None:
    async with connect(cluster) as (_, workers):
        prompt = make_prompt(200, seed=7)
        sequence = make_sequence(prompt)
        sequence.cache_scope.adapter = adapters.digests[0]
        await prefill(workers["prefill-0"], sequence)
        source = await pull_source(workers["prefill-0"], 13)
        for index, num_pulled in ((1, 0), (None, 0), (0, 12)):
            sequence = make_sequence(prompt, max_tokens=NUM_NEW)
            sequence.cache_scope.adapter = "" if index is None else adapters.digests[index]
            request = pb.DecodeRequest(sequence=sequence, pull_from=source)
            async with decoding(workers["decode-0"], request) as decode:
                assert await decode.token_ids() == adapters.expected(index, tuple(prompt))
            assert decode.accepted.accepted.pulled.num_blocks == num_pulled


async def test_a_worker_refuses_an_adapter_that_it_has_not(cluster: RunningStack) -> None:
    async with connect(cluster) as (_, workers):
        sequence = make_sequence(make_prompt(20))
        sequence.cache_scope.adapter = "0" * 32
        with pytest.raises(Exception, match=r"the adapter 0{32} is not loaded here"):
            await prefill(workers["prefill-0"], sequence)


async def test_adapters_are_models_of_the_http_api(cluster: RunningStack, adapters: Adapters) -> None:
    prompt = make_prompt(40, seed=8)
    body = {"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession(f"http://{cluster.http_address}") as session:
        async with session.get("/v1/models") as response:
            assert [each["id"] for each in (await response.json())["data"]][1:] == ["adapter-0", "adapter-1"]
        async with connect(cluster) as (client, _):
            assert (await client.model_info()).adapters == ("adapter-0", "adapter-1")
            for index in (0, 1):
                named = {**body, "model": f"adapter-{index}"}
                async with session.post("/v1/completions", json=named) as response:
                    answer = await response.json()
                assert answer["model"] == f"adapter-{index}"
                assert answer["choices"][0]["text"] == (await generate(client, index, prompt)).text
        async with session.post("/v1/completions", json={**body, "model": "adapter-9"}) as response:
            assert response.status == 404


async def test_a_format_works_with_an_adapter(cluster: RunningStack) -> None:
    async with connect(cluster) as (client, _):
        answer = await client.generate(
            make_prompt(30), model="adapter-0", regex="[ab]{5}", max_tokens=20, temperature=0.0
        )
        assert len(answer.text) == 5
        assert set(answer.text) <= {"a", "b"}


async def test_blocks_on_disk_come_back_only_with_their_own_adapter(
    start_stack: StartStack, adapters: Adapters, tmp_path: Path
) -> None:
    block_bytes = 3 * 2 * 2 * 16 * 32 * 4
    settings = {
        "num_blocks": 26,
        "max_num_seqs": 4,
        "host_cache_bytes": 40 * block_bytes,
        "disk_cache": DiskFolder(str(tmp_path), 400 * (block_bytes + 32)),
        "lora": flags(adapters),
    }
    prompt = make_prompt(330, seed=9)
    with start_stack("llama", **settings) as stack:
        async with connect(stack) as (client, workers):
            for turn in range(2):
                for index in (0, None, 1):
                    answer = await generate(client, index, prompt)
                    assert list(answer.token_ids) == adapters.expected(index, tuple(prompt))
                    assert bool(answer.usage.cached_prompt_tokens) == bool(turn)
                    await wait_until_idle(workers)
            assert metric(stack, "prefill-0", "quire_cache_tier_hits_total", tier="disk") > 0


async def test_adapters_are_added_replaced_and_removed_while_requests_run(
    stack: RunningStack, adapters: Adapters
) -> None:
    prompt = make_prompt(60, seed=10)
    admin = AdminClient(stack.admin_address)
    async with connect(stack) as (client, _):
        options = {"model": "adapter-0", "max_tokens": NUM_NEW, **GREEDY}
        with pytest.raises(NotFound):
            await generate(client, 0, prompt)
        for index in (0, 1, 0):
            digest = await asyncio.to_thread(admin.add_adapter, "adapter-0", str(adapters.paths[index]))
            assert digest == adapters.digests[index]
            begun = await begin(client, prompt, **options)
            answer = await client.generate(prompt, **options)
            assert list(answer.token_ids) == adapters.expected(index, tuple(prompt))
            other = adapters.paths[1 - index]
            await asyncio.to_thread(admin.add_adapter, "adapter-0", str(other))
            assert (await begun)[0] == adapters.expected(index, tuple(prompt))
        begun = await begin(client, prompt, **options)
        await asyncio.to_thread(admin.remove_adapter, "adapter-0")
        with pytest.raises(NotFound):
            await generate(client, 0, prompt)
        assert (await begun)[0] == adapters.expected(1, tuple(prompt))
        with pytest.raises(QuireError, match="no worker has an adapter 'adapter-0'"):
            await asyncio.to_thread(admin.remove_adapter, "adapter-0")
        with pytest.raises(QuireError, match="there is no folder /nowhere"):
            await asyncio.to_thread(admin.add_adapter, "adapter-0", "/nowhere")


async def test_a_request_that_waits_gets_the_weights_that_are_loaded_meanwhile(
    start_stack: StartStack, adapters: Adapters
) -> None:
    prompt = make_prompt(60, seed=11)
    with start_stack("llama", lora=flags(adapters)[:1]) as stack:
        admin = AdminClient(stack.admin_address)
        async with connect(stack) as (client, _):
            await asyncio.to_thread(admin.drain, "decode-0")
            asked = asyncio.create_task(generate(client, 0, prompt))
            await until(
                lambda: asyncio.to_thread(lambda: [e.num_requests for e in admin.status().tenants] == [1])
            )
            await asyncio.to_thread(admin.add_adapter, "adapter-0", str(adapters.paths[1]))
            await asyncio.to_thread(admin.drain, "decode-0", undo=True)
            assert list((await asked).token_ids) == adapters.expected(1, tuple(prompt))


async def test_workers_with_different_weights_of_a_name_share_no_request(
    stack: RunningStack, adapters: Adapters
) -> None:
    prompt = make_prompt(60, seed=11)
    async with connect(stack) as (client, workers):
        for name, path in zip(("prefill-0", "decode-0"), adapters.paths, strict=True):
            request = pb.LoadAdapterRequest(name="adapter-0", path=str(path))
            await workers[name].LoadAdapter(request)
        async with asyncio.timeout(20):
            while (await client.model_info()).adapters != ("adapter-0",):
                await asyncio.sleep(0.01)
        with pytest.raises(QuireError, match="do not have the same weights of the adapter"):
            await client.generate(prompt, model="adapter-0")
        await workers["prefill-0"].LoadAdapter(request)
        async with asyncio.timeout(20):
            while True:
                try:
                    answer = await generate(client, 0, prompt)
                    break
                except QuireError:
                    await asyncio.sleep(0.01)
        assert list(answer.token_ids) == adapters.expected(1, tuple(prompt))
        # Other tests have this stack too.
        await asyncio.to_thread(AdminClient(stack.admin_address).remove_adapter, "adapter-0")


async def test_a_key_may_be_limited_to_some_adapters(
    cluster: RunningStack, adapters: Adapters, tmp_path: Path
) -> None:
    file, [key] = write_keys(tmp_path, Tenant("limited", models=("adapter-1",)))
    config = RouterConfig(
        port=0,
        metrics_port=0,
        api_keys_file=file,
        worker_addresses=tuple(worker.address for worker in cluster.ready.values()),
        cluster_secret=cluster.caller.secret,
    )
    prompt = make_prompt(40, seed=12)
    async with router(config) as running, AsyncClient(running.address, api_key=key) as client:
        await running.has_served.wait()
        answer = await generate(client, 1, prompt)
        assert list(answer.token_ids) == adapters.expected(1, tuple(prompt))
        for index in (0, None):
            with pytest.raises(NotFound, match="is not served to this API key"):
                await generate(client, index, prompt)
