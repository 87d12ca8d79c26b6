"""What a tenant is charged when attempts fail, move, or end with tokens that did not arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import OutOfRange
from quire.services.router.execution.token_charge import AttemptCharge, RequestCharge
from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.token_bucket import TokenBucket
from tests.testing.api_keys import write_keys
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

SECONDS = 10.0
NUM_PROMPT = 3


@given(
    attempts=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8
    )
)
def test_each_position_is_charged_once_over_all_attempts(attempts: list[tuple[int, int, int]]) -> None:
    charged: list[int] = []
    request = RequestCharge(charged.append, 0)
    num_kept = furthest = 0
    for num_generated, keepable, num_missed in attempts:
        attempt = AttemptCharge(request)
        attempt.add("d", num_generated)
        furthest = max(furthest, num_kept + num_generated)
        kept = min(num_generated, keepable)
        attempt.keep(kept)
        attempt.repeat()
        attempt.raise_to("d", num_generated + num_missed)
        num_kept += kept
        assert sum(charged) == furthest
    last = AttemptCharge(request)
    last.add("d", 1)
    last.raise_to("d", 4)
    assert sum(charged) == max(furthest, num_kept + 4)


@given(prompts=st.lists(st.integers(0, 20)), num_prepaid=st.integers(0, 60))
def test_prompts_are_charged_beyond_the_charge_in_advance(prompts: list[int], num_prepaid: int) -> None:
    charged: list[int] = []
    request = RequestCharge(charged.append, num_prepaid)
    for num_tokens in prompts:
        request.add_prompt(num_tokens)
    assert num_prepaid + sum(charged) == max(num_prepaid, sum(prompts))


@pytest.fixture
def charges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of all charges."""
    charged: list[int] = []
    monkeypatch.setattr(TokenBucket, "spend", lambda _, num_tokens: charged.append(num_tokens))
    return charged


@pytest.fixture
async def ask(pair: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that sends a prompt of ``NUM_PROMPT`` tokens and returns the call."""
    file, [key] = write_keys(tmp_path, Tenant("acme", tokens_per_minute=10**6))
    stub = await pair.start(api_keys_file=file)

    def send(timeout: float = SECONDS, **sampling: Any) -> Any:
        generation = pb.Generation(
            token_ids=pb.TokenIds(ids=[7, 8, 9]), sampling=pb.SamplingParams(**sampling)
        )
        return stub.GenerateStream(
            pb.GenerateStreamRequest(generation=generation),
            metadata=(("authorization", f"Bearer {key}"),),
            timeout=timeout,
        )

    return send


@pytest.mark.parametrize("before_token", [0, 1, 3])
@pytest.mark.parametrize("sampling", [{}, {"n": 2}, {"best_of": 3}], ids=str)
async def test_a_lost_worker_costs_the_tenant_nothing(
    pair: Any, ask: Any, charges: list[int], fault: Any, sampling: dict[str, int], before_token: int
) -> None:
    # The next attempt generates again what did not arrive.
    pair.change("decode", fault=fault(before_token), num_generated_tokens=50)
    usage = [response async for response in ask(**sampling)][-1].usage
    assert usage.retries >= 1
    assert usage.completion_tokens == max(sampling.values(), default=1) * len(pair.script.answer)
    assert sum(charges) == NUM_PROMPT + usage.completion_tokens
    assert usage.cached_prompt_tokens <= usage.prompt_tokens


async def test_a_lost_beam_search_is_charged_once(
    pair: Any, ask: Any, charges: list[int], fault: Any
) -> None:
    pair.change("decode", fault=fault(1))
    usage = [response async for response in ask(beam=pb.BeamParams(width=3))][-1].usage
    assert usage.retries >= 1
    assert sum(charges) == NUM_PROMPT + 3 * len(pair.script.answer)


async def test_a_request_that_a_worker_does_not_finish_is_charged(
    pair: Any, ask: Any, charges: list[int], fault: Any
) -> None:
    """No attempt follows an error that another worker would give too."""
    pair.change("decode", fault=fault(2, OutOfRange("scripted")), num_generated_tokens=9)
    await error_of(ask(n=2))
    await until(lambda: sum(charges) == NUM_PROMPT + 9)


async def test_deadlines_and_disconnects_are_charged_for_tokens_that_did_not_arrive(
    pair: Any, ask: Any, charges: list[int]
) -> None:
    pair.change("decode", pause_before_token=2, num_generated_tokens=9)
    await error_of(ask(timeout=0.5, n=2), grpc.StatusCode.DEADLINE_EXCEEDED)
    call = ask(n=2)
    await call.read()
    call.cancel()
    await until(lambda: sum(charges) == 2 * (NUM_PROMPT + 9))
