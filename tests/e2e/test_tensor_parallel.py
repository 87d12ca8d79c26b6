"""Workers that divide the model among processes: the same bits from every pair, and no half workers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest

from quire.benchmarks.harness.random_adapters import make_adapter
from quire.client.admin import AdminClient
from quire.llm import LLM, SamplingParams
from quire.protos import inference_pb2, worker_pb2
from quire.services.local import local_launcher
from quire.services.local import stack as stack_module
from quire.services.local.stack import RunningStack
from quire.services.worker.config import DiskFolder, WorkerConfig
from tests.testing.decodes import decoding, disaggregated, make_sequence, prefill, pull_source
from tests.testing.forked_ranks import run_worker_with_forked_ranks
from tests.testing.processes import children_of, have_ended
from tests.testing.stacks import GREEDY, StartStack, begin, connect, make_prompt, wait_until_idle
from tests.testing.tiny_models import best_tokens, load_reference
from tests.testing.until import until

SIZES = {"prefill-0": 1, "prefill-1": 2, "decode-0": 2, "decode-1": 3}
"""How many processes each worker has. Every worker can compute prompts and decode."""
PAIRS = [*{(SIZES[a], SIZES[b]): (a, b) for a, b in permutations(SIZES, 2)}.values()]
"""Two workers for each pair of sizes."""
HEADS = {"intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
LENGTH, NUM_NEW, NUM_FULL = 200, 24, 12
WAIT_SECONDS = 60.0
ROLES = ("prefill", "decode")


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Path:
    """Return a tiny model with a key-value head for each of four ranks."""
    return tiny_model("llama", num_key_value_heads=4, **HEADS)


@pytest.fixture(scope="module")
def start(model: Path, start_stack: StartStack) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a stack whose workers have these numbers of processes, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_launcher, "run_worker", run_worker_with_forked_ranks)
        # Workers import that function.
        patch.setattr(sys, "path", [*sys.path, os.getcwd()])
        make_configs = stack_module.worker_configs

        def start(sizes: dict[str, int], **settings: Any) -> Any:
            def configs(*arguments: Any) -> dict[str, WorkerConfig]:
                return {
                    name: replace(config, tensor_parallel_size=sizes[name])
                    for name, config in make_configs(*arguments).items()
                }

            patch.setattr(stack_module, "worker_configs", configs)
            small = {"model": str(model), "num_blocks": 256, "max_model_len": 400, "threads": 1}
            counts = {f"num_{role}": sum(each.startswith(role) for each in sizes) for role in ROLES}
            return start_stack("llama", **{**small, **counts, **settings})

        yield start


@pytest.fixture(scope="module")
def stack(start: Callable[..., Any]) -> Iterator[RunningStack]:
    """Run workers of one to three processes, which map each other's pools."""
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


async def answered(
    workers: dict[str, Any], prefill: str, decode: str, prompt: list[int]
) -> tuple[list[Any], worker_pb2.PrefillResponse, worker_pb2.PushSummary]:
    """Let two workers answer: the one computes the prompt and pushes its blocks to the other."""
    tokens, computed, pushed = await disaggregated(workers[prefill], workers[decode], sequence_of(prompt))
    return bits_of(tokens), computed, pushed


async def test_every_pair_of_workers_gives_the_same_bits(stack: RunningStack) -> None:
    """Each pair has a prompt of its own, which neither worker knows at first, and both know later."""
    async with connect(stack) as (_, workers):
        for seed, (prefill, decode) in enumerate(PAIRS, start=100):
            prompt = make_prompt(LENGTH if seed % 2 else 37, seed=seed)
            given, computed, pushed = await answered(workers, prefill, decode, prompt)
            assert (pushed.num_held_blocks, computed.num_cached_tokens) == (0, 0)
            again, computed, _ = await answered(workers, prefill, decode, prompt)
            # A worker that has decoded the answer also has the block with the prompt's last tokens.
            assert computed.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
            other = next(name for name in SIZES if name not in (prefill, decode))
            expected, _ = await local(workers, other, prompt)
            assert given == again == expected, (prefill, decode)
            assert len(expected) == NUM_NEW


async def test_more_ranks_than_key_value_heads(
    start: Callable[..., Any], tiny_model: Callable[..., Path]
) -> None:
    """Ranks that have the same head write the same bytes: 4 ranks two by two, and 3 ranks unevenly."""
    model = tiny_model("llama", **HEADS | {"num_attention_heads": 4, "num_key_value_heads": 2})
    sizes = {"prefill-0": 4, "decode-0": 3, "decode-1": 1}
    with start(sizes, model=str(model)) as stack:
        async with connect(stack) as (_, workers):
            for seed, (prefill, decode) in enumerate(permutations(sizes, 2), start=200):
                prompt = make_prompt(60, seed=seed)
                [other] = sizes.keys() - {prefill, decode}
                given, _, _ = await answered(workers, prefill, decode, prompt)
                assert given == (await local(workers, other, prompt))[0], (prefill, decode)


async def test_the_beginning_of_a_prompt_comes_from_workers_of_both_sizes(stack: RunningStack) -> None:
    async with connect(stack) as (_, workers):
        for seed, (prefill, decode) in enumerate(PAIRS, start=10):
            prompt = make_prompt(LENGTH, seed=seed)
            await local(workers, decode, prompt[:100])
            given, _, pushed = await answered(workers, prefill, decode, prompt)
            assert pushed.num_held_blocks == 6
            other = next(name for name in SIZES if name not in (prefill, decode))
            assert given == (await local(workers, other, prompt))[0]


@pytest.mark.parametrize(("owner", "taker"), PAIRS)
async def test_blocks_are_pulled_from_a_peer_of_another_size(
    stack: RunningStack, owner: str, taker: str
) -> None:
    async with connect(stack) as (_, workers):
        prompt = make_prompt(LENGTH, seed=300 + PAIRS.index((owner, taker)))
        await prefill(workers[owner], sequence_of(prompt))
        source = await pull_source(workers[owner], NUM_FULL + 1)
        given, accepted = await local(workers, taker, prompt, pull_from=source)
        assert (accepted.pulled.num_blocks, accepted.pulled.failure) == (NUM_FULL, "")
        other = next(name for name in SIZES if name not in (owner, taker))
        assert given == (await local(workers, other, prompt))[0]


async def test_adapters_on_workers_of_three_sizes(
    start: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    """One adapter is loaded while the workers serve, and unloaded while its answers are decoded."""
    lora = {
        name: str(make_adapter(tmp_path / name, model, seed=seed, size=0.3)) for seed, name in enumerate("ab")
    }
    asked = [(make_prompt(60, seed=60 + seed), name) for seed in range(3) for name in ("a", "", "b")]
    with LLM(str(model), dtype="float32", num_blocks=256, threads=1, lora=lora) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        prompts, names = map(list, zip(*asked, strict=True))
        outputs = llm.generate(prompts, params, use_tqdm=False, model=names)
    with start({"prefill-0": 2, "decode-0": 1, "decode-1": 3}, lora=(f"a={lora['a']}",)) as stack:
        admin = AdminClient(stack.admin_address)
        async with connect(stack) as (client, _):
            await asyncio.to_thread(admin.add_adapter, "b", lora["b"])
            answers = await asyncio.gather(
                *(begin(client, prompt, model=name, max_tokens=60, **GREEDY) for prompt, name in asked)
            )
            await asyncio.to_thread(admin.remove_adapter, "b")
            for answer, output in zip(answers, outputs, strict=True):
                assert (await answer)[0] == output.outputs[0].token_ids


async def answer(client: Any, prompt: list[int], has_begun: asyncio.Event) -> list[int]:
    """Stream a long greedy answer."""
    tokens: list[int] = []
    async for delta in client.stream(prompt, temperature=0.0, ignore_eos=True, max_tokens=400):
        tokens += delta.token_ids
        has_begun.set()
    return tokens


async def test_answers_continue_on_a_worker_of_another_size(start: Callable[..., Any], model: Path) -> None:
    """A worker is killed, then a rank of another one, and at last a rank of a third one is stopped."""
    sizes = {"prefill-0": 1, "decode-0": 2, "decode-1": 2, "decode-2": 2, "decode-3": 1}
    with start(sizes, num_blocks=512, max_model_len=500) as stack:
        divided = {name: processes_of(stack, name) for name, size in sizes.items() if size > 1}
        async with connect(stack) as (client, workers), asyncio.timeout(3 * WAIT_SECONDS):
            # New prompts go to the workers with the fewest requests.
            prompts = iter([make_prompt(60, seed=30 + index) for index in range(12)])
            given: list[tuple[list[int], list[int]]] = []
            for index, sent in ((0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)):
                asked = list(islice(prompts, 4))
                begun = [asyncio.Event() for _ in asked]
                answers = [
                    asyncio.create_task(answer(client, *each)) for each in zip(asked, begun, strict=True)
                ]
                await asyncio.gather(*(each.wait() for each in begun))
                processes = divided.pop(await busy(workers, [*divided]))
                os.kill(processes[index], sent)
                await until(partial(have_ended, processes))
                given += zip(asked, await asyncio.gather(*answers), strict=True)
    for prompt, tokens in given:
        assert len(tokens) == 400
        assert tokens == best_tokens(load_reference(model), prompt, tokens)


def processes_of(stack: RunningStack, name: str) -> list[int]:
    """Return the processes of a worker, that of its engine first."""
    worker = stack.workers[name].process.pid
    assert worker is not None
    return [worker, *children_of(worker)]


async def busy(workers: dict[str, Any], names: list[str]) -> str:
    """Return the first of some workers that decodes an answer."""
    while True:
        for name in names:
            if (await workers[name].GetLoad(worker_pb2.GetLoadRequest())).num_running:
                return name


async def test_a_prompt_is_retried_elsewhere_when_a_rank_ends_during_the_push(
    start: Callable[..., Any],
) -> None:
    sizes = {"prefill-0": 2, "decode-0": 1}
    with start(sizes, max_num_batched_tokens=4, max_num_seqs=4, transport="messages") as stack:
        processes = processes_of(stack, "prefill-0")
        async with connect(stack) as (client, workers), asyncio.timeout(WAIT_SECONDS):
            prompt = make_prompt(350, seed=50)
            greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
            asking = asyncio.create_task(client.generate(prompt, **greedy))
            while not (load := await workers["decode-0"].GetLoad(worker_pb2.GetLoadRequest())).used_blocks:
                await asyncio.sleep(0.001)
            assert load.num_transferring, "the push has ended too soon"
            os.kill(processes[1], signal.SIGKILL)
            tokens = list((await asking).token_ids)
            await until(partial(have_ended, processes))
            assert list((await client.generate(prompt, **greedy)).token_ids) == tokens


async def test_an_idle_worker_ends_with_its_rank(start: Callable[..., Any]) -> None:
    with start({"decode-0": 2, "decode-1": 2, "decode-2": 1}) as stack:
        async with connect(stack) as (client, _):
            for name, sent in (("decode-0", signal.SIGKILL), ("decode-1", signal.SIGSTOP)):
                worker, rank = processes_of(stack, name)
                os.kill(rank, sent)
                await until(partial(have_ended, (worker, rank)))
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
