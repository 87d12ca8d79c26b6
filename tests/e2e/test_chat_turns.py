"""Turns of a chat on any worker reuse what earlier turns left on any other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import takewhile
from random import Random
from typing import Any

import pytest

from quire.client import Message
from quire.kvindex import guarded_index
from quire.models.notes import HELD_OUT_SEEDS, answer, question, sample_notes, text
from quire.protos import worker_pb2
from quire.routing import policy
from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Blocks, Peer
from quire.services.local.config import LocalStackConfig
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from quire.services.router.execution import attempt
from tests.testing.stacks import connect, metric
from tests.testing.until import until

NUM_CHATS, NUM_TURNS, NUM_FACTS = 2, 4, 20
MAX_TOKENS = 16
BLOCK_SIZE = 16
ROLES = ("prefill", "decode")
WAIT_SECONDS = 20.0


PLACING = PolicyConfig(policy=Policy.LOAD, local_prefill_tokens=0)
"""Idle workers have the same load, so chance decides between them."""
SECRET = "secret"
PUBLISHED = "quire_index_publish_entries_total"


def pull_most(
    own_tokens: int, peers: Sequence[Peer], blocks: Blocks, *_: object
) -> tuple[Peer, float] | None:
    """Return the peer that brings the most blocks, however long it takes."""
    best = max(peers, key=lambda peer: peer.num_blocks, default=None)
    return None if best is None or best.num_blocks <= own_tokens // blocks.tokens else (best, 0.0)


@pytest.fixture(params=[2, 0], ids=["2P2D", "2D"])
async def stack(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningStack]:
    """Run decode and maybe prefill workers of the demo model; chance decides who serves a turn."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", SECRET)
    # A busy machine gives up late look-ups and pulls and reuses nothing: right, but not the subject here.
    monkeypatch.setattr(guarded_index, "BUDGET_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(attempt, "MIN_PULL_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(policy, "choose_pull", pull_most)
    with RedisProcess() as redis:
        config = LocalStackConfig(
            num_prefill=request.param,
            num_decode=2,
            redis_url=redis.url,
            router=RouterConfig(port=0),
            log_level="error",
        )
        ours = RouterConfig(
            port=0,
            metrics_port=0,
            redis_url=redis.router_url,
            cluster_secret=SECRET.encode(),
            placing=PLACING,
            poll_seconds=0.05,
        )
        with local_stack(config) as running:
            async with router(ours) as own:
                await own.has_served.wait()
                await until(lambda: sum(len(own.workers.live(role)) for role in ROLES) == len(running.ready))
                yield replace(running, addresses={"own": own.addresses})


async def test_every_turn_reuses_all_that_any_worker_holds(stack: RunningStack) -> None:
    async with connect(stack) as (client, workers):
        for chat in range(NUM_CHATS):
            notes = sample_notes(Random(3 * HELD_OUT_SEEDS + chat), NUM_FACTS)
            messages: list[Message] = []
            held: list[int] = []
            for turn in range(NUM_TURNS):
                asked = notes[turn]
                first = f"{text(notes)} " if turn == 0 else ""
                messages.append({"role": "user", "content": first + question(asked)})
                prompt = await client.tokenize(messages)
                completion = await client.chat(messages, temperature=0.0, max_tokens=MAX_TOKENS)
                assert completion.text == answer(asked)
                num_common = sum(
                    1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, held, strict=False))
                )
                num_reusable = num_common // BLOCK_SIZE * BLOCK_SIZE
                assert completion.usage.cached_prompt_tokens >= num_reusable - BLOCK_SIZE, f"turn {turn}"
                assert completion.usage.cached_prompt_tokens < num_reusable + BLOCK_SIZE
                if not any(name.startswith("prefill") for name in workers):
                    usage = completion.usage
                    num_reused = usage.blocks_reused_on_decode + usage.blocks_pulled
                    assert num_reused == usage.cached_prompt_tokens // BLOCK_SIZE
                assert turn == 0 or num_reusable >= len(held) - 2 * BLOCK_SIZE
                # The last token was drawn, and never computed.
                held = [*prompt, *completion.token_ids][:-1]
                messages.append({"role": "assistant", "content": completion.text})
                await published(stack, workers)


async def published(stack: RunningStack, workers: dict[str, Any]) -> None:
    """Wait until the index knows every block that a worker holds; none has been evicted here."""
    async with asyncio.timeout(WAIT_SECONDS):
        for name, stub in workers.items():
            while True:
                load = await stub.GetLoad(worker_pb2.GetLoadRequest())
                if not load.used_blocks and load.cached_blocks == metric(
                    stack, name, PUBLISHED, op="publish"
                ):
                    break
                await asyncio.sleep(0.01)
