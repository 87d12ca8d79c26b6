"""Workers that divide the model among processes: the same bits from every pair, and no half workers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from quire.protos import inference_pb2, worker_pb2
from quire.routing.placement import PolicyConfig
from quire.services.local import stack as stack_module
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import DiskFolder, WorkerConfig
from tests.testing.decodes import decoding, disaggregated, make_sequence, prefill, pull_source
from tests.testing.stacks import connect, make_prompt, wait_until_idle

SIZES = {"prefill-0": 1, "prefill-1": 3, "decode-0": 2, "decode-1": 4}
"""How many processes each worker has. Every worker can compute prompts and decode."""
PAIRS = list(permutations(SIZES, 2))
HEADS = {"intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
LENGTH, NUM_NEW, NUM_FULL = 200, 24, 12
WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    """Return a tiny model with a key-value head for each of four ranks."""
    return tiny_model("llama", num_key_value_heads=4, **HEADS)


@pytest.fixture(scope="module")
def start(model: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a stack whose workers have these numbers of processes, by name."""
    with pytest.MonkeyPatch.context() as patch:
        make_configs = stack_module.worker_configs

        def start(sizes: dict[str, int], **settings: Any) -> Any:
            def configs(*arguments: Any) -> dict[str, WorkerConfig]:
                return {
                    name: replace(config, tensor_parallel_size=sizes[name])
                    for name, config in make_configs(*arguments).items()
                }

            patch.setattr(stack_module, "worker_configs", configs)
            worker = {"model": str(model), "num_blocks": 256, "max_model_len": 400, "threads": 1, **settings}
            config = LocalStackConfig(
                num_prefill=sum(name.startswith("prefill") for name in sizes),
                num_decode=sum(name.startswith("decode") for name in sizes),
                router=RouterConfig(port=0, placing=PolicyConfig(local_prefill_tokens=0)),
                worker=WorkerConfig(role="decode", dtype="float32", **worker),
                log_level="error",
            )
            return local_stack(config)

        yield start


@pytest.fixture(scope="module")
def stack(start: Callable[..., Any]) -> Iterator[RunningStack]:
    """Run workers of one to four processes, which map each other's pools."""
    with start(SIZES) as running:
        yield running


def sequence_of(prompt: list[int]) -> worker_pb2.Sequence:
    sampling = inference_pb2.SamplingParams(temperature=0.8, top_p=1.0, seed=3)
    return make_sequence(prompt, NUM_NEW, sampling=sampling, logprobs=2)


def bits_of(tokens: list[worker_pb2.SampledToken]) -> list[Any]:
    """Return the tokens and the exact logprobs of the best ones."""
    return [(token.token_id, token.logprobs.SerializeToString(deterministic=True)) for token in tokens]


async def local(
    workers: dict[str, Any], name: str, prompt: list[int], **fields: Any
) -> tuple[list[Any], Any]:
    """Let a decode worker compute the prompt, too."""
    request = worker_pb2.DecodeRequest(sequence=sequence_of(prompt), **fields)
    async with decoding(workers[name], request) as begun:
        tokens = [token for output in await begun.outputs() for token in output.tokens]
        return bits_of(tokens), begun.accepted.accepted


def ranks_of(stack: RunningStack, name: str) -> list[int]:
    """Return the processes that a worker has started and that run a rank."""
    worker = stack.workers[name].process.pid
    assert worker is not None
    children = Path(f"/proc/{worker}/task").glob("*/children")
    found = [int(pid) for path in children for pid in path.read_text().split()]
    return [pid for pid in found if b"quire.engine.ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


async def ended(process_ids: list[int], seconds: float = WAIT_SECONDS) -> None:
    """Wait until processes have ended."""
    async with asyncio.timeout(seconds):
        while any(map(is_running, process_ids)):
            await asyncio.sleep(0.02)


async def answered(
    workers: dict[str, Any], prefill: str, decode: str, prompt: list[int]
) -> tuple[list[Any], worker_pb2.Accepted, worker_pb2.PrefillResponse]:
    """Let two workers answer: the one computes the prompt and pushes its blocks to the other."""
    tokens, accepted, computed = await disaggregated(workers[prefill], workers[decode], sequence_of(prompt))
    return bits_of(tokens), accepted, computed


async def test_every_pair_of_workers_gives_the_same_bits(stack: RunningStack) -> None:
    """Each pair has a prompt of its own, which neither worker knows at first, and both know later."""
    async with connect(stack) as (_, workers):
        for seed, (prefill, decode) in enumerate(PAIRS, start=100):
            prompt = make_prompt(LENGTH if seed % 2 else 37, seed=seed)
            given, accepted, computed = await answered(workers, prefill, decode, prompt)
            assert (accepted.num_cached_tokens, computed.num_cached_tokens) == (0, 0)
            again, _, computed = await answered(workers, prefill, decode, prompt)
            # A worker that has decoded the answer also has the block with the prompt's last tokens.
            assert computed.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
            other = next(name for name in SIZES if name not in (prefill, decode))
            expected, _ = await local(workers, other, prompt)
            assert given == again == expected, (prefill, decode)
            assert len(expected) == NUM_NEW
        await wait_until_idle(workers)


async def test_workers_of_the_same_size_push_to_each_other(start: Callable[..., Any]) -> None:
    with start({"prefill-0": 2, "decode-0": 2}) as stack:
        async with connect(stack) as (_, workers):
            prompts = [make_prompt(length, seed=300) for length in (60, 200)]
            for prompt in prompts:
                given, accepted, _ = await answered(workers, "prefill-0", "decode-0", prompt)
                assert accepted.num_cached_tokens == 0
                again, accepted, computed = await answered(workers, "decode-0", "prefill-0", prompt)
                assert again == given
                assert accepted.num_cached_tokens
                assert computed.num_cached_tokens
            await wait_until_idle(workers)


async def test_more_ranks_than_key_value_heads(
    start: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    """Ranks that have the same head write the same bytes: 4 ranks two by two, and 3 ranks unevenly."""
    model = tiny_model("llama", num_key_value_heads=2, **HEADS)
    sizes = {"prefill-0": 4, "decode-0": 3, "decode-1": 1}
    with start(sizes, model=str(model)) as stack:
        async with connect(stack) as (_, workers):
            for seed, (prefill, decode) in enumerate(permutations(sizes, 2), start=200):
                prompt = make_prompt(60, seed=seed)
                [other] = sizes.keys() - {prefill, decode}
                given, _, _ = await answered(workers, prefill, decode, prompt)
                assert given == (await local(workers, other, prompt))[0], (prefill, decode)
            await wait_until_idle(workers)


async def test_the_beginning_of_a_prompt_comes_from_workers_of_both_sizes(stack: RunningStack) -> None:
    async with connect(stack) as (_, workers):
        for seed, (prefill, decode) in enumerate(PAIRS, start=10):
            prompt = make_prompt(LENGTH, seed=seed)
            await local(workers, decode, prompt[:100])
            given, accepted, _ = await answered(workers, prefill, decode, prompt)
            assert accepted.num_cached_tokens == 96
            other = next(name for name in SIZES if name not in (prefill, decode))
            assert given == (await local(workers, other, prompt))[0]
        await wait_until_idle(workers)


@pytest.mark.parametrize(("owner", "taker"), PAIRS)
async def test_blocks_are_pulled_from_a_peer_of_another_size(
    stack: RunningStack, owner: str, taker: str
) -> None:
    async with connect(stack) as (_, workers):
        prompt = make_prompt(LENGTH, seed=300 + 10 * SIZES[owner] + SIZES[taker])
        await prefill(workers[owner], sequence_of(prompt))
        source = await pull_source(workers[owner], NUM_FULL + 1)
        given, accepted = await local(workers, taker, prompt, pull_from=source)
        assert (accepted.pulled.num_blocks, accepted.pulled.failure) == (NUM_FULL, "")
        other = next(name for name in SIZES if name not in (owner, taker))
        assert given == (await local(workers, other, prompt))[0]
        await wait_until_idle(workers)


async def answer(client: Any, prompt: list[int], has_begun: asyncio.Event | None = None) -> list[int]:
    """Stream a long greedy answer."""
    tokens: list[int] = []
    async for delta in client.stream(prompt, temperature=0.0, ignore_eos=True, max_tokens=400):
        tokens += delta.token_ids
        if has_begun is not None:
            has_begun.set()
    return tokens


@pytest.mark.parametrize("victim", ["worker", "rank", "stopped rank"])
async def test_answers_continue_on_a_worker_of_another_size(start: Callable[..., Any], victim: str) -> None:
    sizes = {"prefill-0": 2, "decode-0": 2, "decode-1": 1}
    with start(sizes, num_blocks=512, max_model_len=500) as stack:
        ranks, worker = ranks_of(stack, "decode-0"), stack.workers["decode-0"].process.pid
        assert worker is not None
        async with connect(stack) as (client, workers), asyncio.timeout(WAIT_SECONDS):
            prompts = [make_prompt(60, seed=30 + index) for index in range(6)]
            expected = [await answer(client, prompt) for prompt in prompts]
            begun = [asyncio.Event() for _ in prompts]
            answers = [
                asyncio.create_task(answer(client, prompt, has_begun))
                for prompt, has_begun in zip(prompts, begun, strict=True)
            ]
            await asyncio.gather(*(each.wait() for each in begun))
            # The first token of an answer comes from the prefill worker.
            while not (await workers["decode-0"].GetLoad(worker_pb2.GetLoadRequest())).num_running:
                await asyncio.sleep(0.001)
            sent = signal.SIGSTOP if victim == "stopped rank" else signal.SIGKILL
            os.kill(worker if victim == "worker" else ranks[0], sent)
            await ended([*ranks, worker])
            assert await asyncio.gather(*answers) == expected


@pytest.mark.parametrize("victim", ["worker", "rank"])
async def test_a_prompt_is_retried_elsewhere_when_its_worker_ends_during_the_push(
    start: Callable[..., Any], victim: str
) -> None:
    sizes = {"prefill-0": 2, "decode-0": 1}
    with start(sizes, max_num_batched_tokens=4, max_num_seqs=4, transport="messages") as stack:
        ranks, worker = ranks_of(stack, "prefill-0"), stack.workers["prefill-0"].process.pid
        assert worker is not None
        async with connect(stack) as (client, workers), asyncio.timeout(WAIT_SECONDS):
            prompt = make_prompt(350, seed=50)
            greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
            asking = asyncio.create_task(client.generate(prompt, **greedy))
            while not (load := await workers["decode-0"].GetLoad(worker_pb2.GetLoadRequest())).used_blocks:
                await asyncio.sleep(0.001)
            assert load.num_transferring, "the push has ended too soon"
            os.kill(worker if victim == "worker" else ranks[0], signal.SIGKILL)
            tokens = list((await asking).token_ids)
            await ended([*ranks, worker])
            assert list((await client.generate(prompt, **greedy)).token_ids) == tokens
            await wait_until_idle({"decode-0": workers["decode-0"]})


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_idle_worker_ends_with_its_rank(start: Callable[..., Any], sent: signal.Signals) -> None:
    with start({"decode-0": 2, "decode-1": 1}) as stack:
        async with connect(stack) as (client, _):
            [rank] = ranks_of(stack, "decode-0")
            worker = stack.workers["decode-0"].process.pid
            assert worker is not None
            os.kill(rank, sent)
            await ended([rank, worker])
            response = await client.generate(make_prompt(20, seed=31), max_tokens=4, ignore_eos=True)
            assert len(response.token_ids) == 4


async def test_blocks_on_disk_are_the_same_for_any_number_of_processes(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool so small that blocks cycle through host memory and disk, and a restart with another size."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "known")  # the disk's blocks are of this cluster
    block_bytes = 3 * 2 * 4 * 16 * 32 * 4
    settings = {
        "num_blocks": 26,
        "max_num_seqs": 4,
        "host_cache_bytes": 20 * block_bytes,
        "disk_cache": DiskFolder(str(tmp_path), 400 * (block_bytes + 32)),
    }
    prompts = [make_prompt(LENGTH, seed=40 + index) for index in range(4)]
    answers = []
    for sizes in ({"prefill-0": 2, "decode-0": 1}, {"prefill-0": 1, "decode-0": 2}):
        with start(sizes, **settings) as stack:
            async with connect(stack) as (client, workers):
                for prompt in (*prompts, *prompts):
                    response = await client.generate(prompt, temperature=0.8, seed=1, max_tokens=NUM_NEW)
                    answers.append((list(response.token_ids), response.usage.cached_prompt_tokens))
                    await wait_until_idle(workers)
    tokens, cached = zip(*answers, strict=True)
    assert tokens == tokens[:4] * 4
    assert cached[:4] == (0,) * 4
    # The last blocks may still be on their way to disk, or be lost when the worker ends.
    assert all(each >= NUM_FULL // 2 * 16 for each in cached[4:8]), cached
    assert sum(cached[8:12]) >= 2 * NUM_FULL * 16, cached
