"""How blocks move between processes of one host: out of each other's memory, or in messages if so chosen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quire.protos import worker_pb2
from quire.services.local.stack import RunningStack
from tests.testing.decodes import make_sequence, prefill, pull_source
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle
from tests.testing.until import until

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 64}
PAGE = 4096


def pool_mappings(stack: RunningStack, worker: str) -> list[tuple[int, int]]:
    """Return the address ranges of the pools that a worker has mapped, its own among them."""
    maps = Path(f"/proc/{stack.workers[worker].process.pid}/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "memfd:quire-kv" in line]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def num_bytes(stack: RunningStack, direction: str) -> dict[str, float]:
    """Return how many bytes all workers have moved in a direction, by transport."""
    name = "quire_kv_transfer_bytes_total"
    return {
        each: sum(metric(stack, worker, name, direction=direction, transport=each) for worker in stack.ready)
        for each in ("messages", "shared", "nixl")
    }


async def check_pushes(stack: RunningStack, transport: str, expected: Any) -> None:
    """Check that blocks are pushed by one transport only, and that the tokens are right."""
    async with connect(stack) as (client, _):
        prompts = [make_prompt(length, seed=61) for length in (40, 100, 200)]
        answers = await asyncio.gather(*(client.generate(prompt, **GREEDY) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.token_ids) == expected("llama", prompt)
    for direction in ("sent", "received"):
        counted = num_bytes(stack, direction)
        assert counted[transport] > 0
        assert sum(counted.values()) == counted[transport]


async def test_workers_of_one_host_push_through_shared_memory(stack: RunningStack, expected: Any) -> None:
    await check_pushes(stack, "shared", expected)


async def test_messages_carry_blocks_if_so_chosen(start_stack: StartStack, expected: Any) -> None:
    with start_stack("llama", transport="messages") as stack:
        await check_pushes(stack, "messages", expected)


async def test_nixl_carries_blocks_and_a_killed_holder_costs_no_answer(
    start_stack: StartStack, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl_cu12", reason="the extra 'nixl' is not installed")
    # All machines have the loopback device.
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with start_stack("llama", num_prefill=2, transport="nixl") as stack:
        await check_pushes(stack, "nixl", expected)
        async with connect(stack) as (_, workers):
            prompt = make_prompt(200)
            computed = await prefill(workers["prefill-0"], make_sequence(prompt))
            source = await pull_source(workers["prefill-0"], 200 // 16)
            pulled = await prefill(workers["prefill-1"], make_sequence(prompt), pull_from=source)
            assert (pulled.pulled.num_blocks, pulled.pulled.failure) == (200 // 16, "")
            for response in (computed, pulled):
                assert response.tokens[0].token_id == expected("llama", prompt)[0]
            assert [each for each, count in num_bytes(stack, "pulled").items() if count] == ["nixl"]
            stack.workers["prefill-0"].process.kill()
            other = make_prompt(100)
            failed = await prefill(workers["prefill-1"], make_sequence(other), pull_from=source)
            assert failed.pulled.failure
            assert failed.tokens[0].token_id == expected("llama", other)[0]


def change_memory(stack: RunningStack, worker: str) -> int:
    """Change the last bit of one value in each page of a worker's pool that is in use; return how many."""
    [(start, end)] = pool_mappings(stack, worker)
    num_changed = 0
    with Path(f"/proc/{stack.workers[worker].process.pid}/mem").open("r+b", buffering=0) as memory:
        for address in range(start, end, PAGE):
            memory.seek(address)
            if any(first := memory.read(4)):
                memory.seek(address)
                memory.write(bytes([first[0] ^ 1]) + first[1:])
                num_changed += 1
    return num_changed


async def test_changed_blocks_are_computed_again_and_the_memory_of_a_killed_worker_does_not_stay(
    start_stack: StartStack, expected: Any
) -> None:
    """The decode worker refuses them, and the prefill worker forgets them: no third attempt meets them."""
    labels = {"reason": "digest_mismatch"}
    with start_stack("llama") as stack:
        async with connect(stack) as (client, workers):
            prompt = make_prompt(200)

            async def answer() -> float:
                """Answer the prompt on workers of which only the prefill worker has it in its cache."""
                await wait_until_idle(workers)
                await workers["decode-0"].ClearCache(worker_pb2.ClearCacheRequest())
                assert list((await client.generate(prompt, **GREEDY)).token_ids) == expected("llama", prompt)
                return metric(stack, "decode-0", "quire_kv_transfer_failures_total", **labels)

            assert await answer() == 0
            await wait_until_idle(workers)
            forbidden = ""
            try:
                assert change_memory(stack, "prefill-0")
            except PermissionError as error:
                forbidden = f"this user may not write another process's memory: {error}"
            for _ in range(2):
                assert await answer() == (0 if forbidden else 1)
            # Nothing that remembers the refused blocks may keep the memory of a worker that has ended.
            assert len(pool_mappings(stack, "decode-0")) == 2
            stack.workers["prefill-0"].process.kill()
            await until(lambda: len(pool_mappings(stack, "decode-0")) == 1)
            other = make_prompt(80)
            assert list((await client.generate(other, **GREEDY)).token_ids) == expected("llama", other)
    if forbidden:
        pytest.skip(forbidden)
