"""What the router measures of the turns of a session, how much it remembers, and the end of a session."""

from __future__ import annotations

from array import array
from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from quire.kvindex.block_hash import CacheScope
from quire.protos import inference_pb2 as pb
from quire.rpc.errors import Unavailable
from quire.services.router.metrics.turns import LastTurn, Turns
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys
from tests.testing.fake_worker import Fault

REPEATED, CACHED = "quire_turn_repeat_ratio", "quire_turn_cached_ratio"


class Recorded:
    """Turns, and what they observed."""

    def __init__(self, **limits: int) -> None:
        self._registry = CollectorRegistry()
        self._turns = Turns(self._registry, **limits)

    def record(self, session: str, prompt: Any, answer: Any = (), tenant: str = "", cached: int = 0) -> None:
        self._turns.record(CacheScope(tenant), session, prompt, answer, cached)

    def forget(self, session: str, tenant: str = "") -> LastTurn | None:
        return self._turns.forget(tenant, session)

    def read(self, name: str = REPEATED) -> tuple[float, float]:
        """Return the number and the sum of a histogram's values."""
        number, total = (self._registry.get_sample_value(f"{name}_{kind}") for kind in ("count", "sum"))
        assert number is not None
        assert total is not None
        return number, total


@pytest.mark.parametrize(
    ("prompt", "ratio"),
    [
        ([1, 2, 3, 4, 5, 6], 1.0),
        ([1, 2, 3, 4], 1.0),
        ([1, 2, 3], 0.75),
        ([1, 2, 3, 9, 5], 0.75),
        ([1, 2, 259, 4], 0.5),
        ([9, 2, 3, 4], 0.0),
    ],
)
def test_the_repeated_share_counts_whole_tokens(prompt: list[int], ratio: float) -> None:
    recorded = Recorded()
    recorded.record("s", [1, 2], [3, 4])
    assert recorded.read() == (0, 0)
    recorded.record("s", prompt, cached=len(prompt) - 1)
    assert recorded.read() == (1, ratio)
    assert recorded.read(CACHED) == pytest.approx((1, 1 - 1 / len(prompt)))


def test_a_request_without_a_session_is_not_remembered() -> None:
    recorded = Recorded()
    for _ in range(2):
        recorded.record("", [1, 2], [3])
    assert recorded.read() == recorded.read(CACHED) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_tenants_never_share_a_session(seed: int) -> None:
    rng, names = Random(seed), ["", "a", "a/b", "b"]
    together, alone = Recorded(), {tenant: Recorded() for tenant in names}
    for _ in range(100):
        tenant, session = rng.choice(names), rng.choice(names)
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 6))]
        for recorded in (together, alone[tenant]):
            recorded.record(session, prompt, [1], tenant=tenant)
    number, total = map(sum, zip(*(each.read() for each in alone.values()), strict=True))
    assert together.read() == pytest.approx((number, total))


@pytest.mark.parametrize("limits", [{"max_sessions": 2}, {"max_bytes": 2 * 4 * 4}])
def test_the_session_that_was_used_least_recently_is_forgotten(limits: dict[str, int]) -> None:
    recorded = Recorded(**limits)
    for session in ("old", "kept", "old", "new"):
        recorded.record(session, [1, 2, 3], [4])
    assert recorded.read()[0] == 1
    recorded.record("old", [1, 2, 3, 4])
    assert recorded.read()[0] == 2
    recorded.record("kept", [1, 2, 3, 4])
    assert recorded.read()[0] == 2


def test_a_sequence_above_the_limit_is_not_remembered() -> None:
    recorded = Recorded(max_bytes=8)
    for _ in range(2):
        recorded.record("s", [1, 2, 3])
    assert recorded.read()[0] == 0
    for _ in range(2):
        recorded.record("s", [1, 2])
    assert recorded.read()[0] == 1


def test_a_forgotten_session_begins_again() -> None:
    recorded = Recorded(max_bytes=24)
    recorded.record("s", [1, 2], [3])
    recorded.record("s", [1, 2, 3, 4], [5])
    last = recorded.forget("s")
    assert last is not None
    assert (last.num_first, array("I", last.tokens).tolist()) == (2, [1, 2, 3, 4, 5])
    assert recorded.forget("s") is None
    for _ in range(2):
        recorded.record("s", [1, 2, 3, 4], [5])
    assert recorded.read()[0] == 2, "the forgotten sequence still counts as remembered bytes"


async def ask(stub: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the prompt and its answer."""
    metadata = options.pop("metadata", ())
    generation = pb.Generation(token_ids=pb.TokenIds(ids=prompt), **options)
    response = await stub.Generate(pb.GenerateRequest(generation=generation), metadata=metadata, timeout=10)
    return prompt + list(response.choices[0].token_ids)


def observed(pair: Any, name: str = REPEATED) -> tuple[float, float]:
    return pair.metric(f"{name}_count"), pair.metric(f"{name}_sum")


async def test_the_turns_of_a_conversation(pair: Any, stub: Any) -> None:
    pair.change("prefill", num_cached_tokens=4)
    first = await ask(stub, [5] * 8, session="s")
    assert observed(pair) == (0, 0)
    # The second turn repeats the whole first one, and the third one half of the second.
    second = await ask(stub, [*first, 6, 7], metadata=[("x-session-id", "s")], session="ignored")
    assert observed(pair) == (1, 1)
    assert observed(pair, CACHED) == (1, 4 / (len(first) + 2))
    half = len(second) // 2
    await ask(stub, [*second[:half], 3], session="s")
    assert observed(pair) == pytest.approx((2, 1 + half / len(second)))
    await ask(stub, [5] * 8, session="other")
    assert observed(pair)[0] == 2


async def test_only_the_prompt_counts_before_several_answers(pair: Any, stub: Any) -> None:
    await ask(stub, [5] * 8, session="s", sampling=pb.SamplingParams(n=2))
    await ask(stub, [5] * 8, session="s")
    assert observed(pair) == (1, 1)


async def test_http_requests_name_sessions_within_their_tenant(pair: Any, tmp_path: Path) -> None:
    file, keys = write_keys(tmp_path, Tenant("acme"), Tenant("other"))
    await pair.start(http_port=0, api_keys_file=file)
    calls: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"X-Session-Id": "s"}, {"prompt_cache_key": "ignored"}),
        ({}, {"prompt_cache_key": "s"}),
        ({}, {"metadata": {"session_id": "s"}}),
    ]
    async with ClientSession(f"http://{pair.running.http.address}") as http:
        for number, (sent_headers, body) in enumerate(calls):
            for key in keys:
                headers = {"authorization": f"Bearer {key}", **sent_headers}
                sent = {"prompt": "say hello world", **body}
                async with http.post("/v1/completions", json=sent, headers=headers) as response:
                    assert response.status == 200, await response.text()
            assert observed(pair)[0] == 2 * number


def forgotten(pair: Any) -> dict[str, tuple[int, int]]:
    """Return the number of blocks and of those to keep, by the workers that were asked to forget."""
    workers = pair.workers.items()
    return {n: (len(f.block_hashes), f.num_kept) for n, worker in workers for f in worker.forgotten}


async def test_the_end_of_a_session_forgets_what_follows_its_first_prompt(pair: Any, stub: Any) -> None:
    first = await ask(stub, [5] * 9, session="s")
    await ask(stub, [*first, 6, 7], session="s")
    pair["p1"].fault = Fault(0, Unavailable("gone"))
    ended = await stub.EndSession(pb.EndSessionRequest(session="s"), timeout=10)
    num_blocks = len(pair["d1"].forgotten[0].block_hashes)
    assert num_blocks > 2
    assert forgotten(pair) == dict.fromkeys(("p2", "d1", "d2"), (num_blocks, 2))
    assert ended.num_blocks == 3 * (num_blocks - 2) == pair.metric("quire_ended_session_blocks_total")
    assert (await stub.EndSession(pb.EndSessionRequest(session="s"), timeout=10)).num_blocks == 0
    await ask(stub, [*first, 6, 7], session="s")
    assert observed(pair)[0] == 1


@pytest.mark.parametrize("name", ["", "s" * 129, "\u00e9"])
async def test_a_session_that_no_request_can_name_cannot_end(stub: Any, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="1 to 128 printable ASCII") as error:
        await stub.EndSession(pb.EndSessionRequest(session=name), timeout=10)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tenant_cannot_end_a_session_of_another(pair: Any, tmp_path: Path) -> None:
    file, keys = write_keys(tmp_path, Tenant("acme"), Tenant("other"))
    await pair.start(http_port=0, api_keys_file=file)
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in keys)
    async with ClientSession(f"http://{pair.running.http.address}") as http:

        async def end(**options: Any) -> tuple[int, Any]:
            async with http.delete("/v1/sessions/a%2Fb", **options) as response:
                return response.status, await response.json()

        sent = {"prompt": "say hello world", "prompt_cache_key": "a/b"}
        async with http.post("/v1/completions", json=sent, headers=mine) as response:
            assert response.status == 200, await response.text()
        assert (await end())[0] == 401
        assert await end(headers=theirs) == (200, {"id": "a/b", "num_blocks": 0})
        assert not forgotten(pair)
        status, ended = await end(headers=mine)
        assert (status, ended) == (200, {"id": "a/b", "num_blocks": ended["num_blocks"]})
        assert ended["num_blocks"] > 0
        assert len(forgotten(pair)) == 4
