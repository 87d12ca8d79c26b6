"""Errors as the clients of OpenAI and Anthropic raise them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import grpc
import openai
import pytest
from aiohttp import web

from quire.rpc.errors import (
    REQUEST_FAILED,
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys

MESSAGES: Any = [{"role": "user", "content": "say hello world, stop here"}]
SDKS = ("openai", "anthropic")


def either(name: str) -> Any:
    """Return the exceptions of this name of both clients."""
    return getattr(openai, name), getattr(anthropic, name)


class Forbidden(ServiceError):
    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "FORBIDDEN"


class Clients(NamedTuple):
    """A client of each kind, and the calls that ask for an answer."""

    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    async def ask(self, sdk: str, max_retries: int = 0, **options: Any) -> Any:
        wanted = {"model": "tiny", "messages": MESSAGES, "max_tokens": 50} | options
        if sdk == "openai":
            completions: Any = self.openai.with_options(max_retries=max_retries).chat.completions
            return await completions.create(**wanted)
        messages: Any = self.anthropic.with_options(max_retries=max_retries).messages
        return await messages.create(**wanted)


Connect = Callable[..., Any]


@pytest.fixture
async def connect(pair: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    """Return a function that starts the router and returns its clients, which soon try again."""
    for sdk in SDKS:
        monkeypatch.setattr(f"{sdk}._base_client.INITIAL_RETRY_DELAY", 0.001)

    async with AsyncExitStack() as stack:

        async def connect(key: str = "none", **options: Any) -> Clients:
            await pair.start(http_port=0, **options)
            url = f"http://{pair.running.http.address}"
            return Clients(
                await stack.enter_async_context(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key)),
                await stack.enter_async_context(anthropic.AsyncAnthropic(base_url=url, api_key=key)),
            )

        yield connect


TOO_LARGE = web.HTTPRequestEntityTooLarge(1, 2)
RAISED: list[tuple[Exception, int, str, type[Exception], type[Exception], bool]] = [
    (
        Forbidden("no"),
        403,
        "permission_error",
        openai.PermissionDeniedError,
        anthropic.PermissionDeniedError,
        False,
    ),
    (
        web.HTTPRequestTimeout(),
        408,
        "timeout_error",
        openai.APIStatusError,
        anthropic.RequestTimeoutError,
        True,
    ),
    (Aborted("no"), 409, "conflict_error", openai.ConflictError, anthropic.ConflictError, True),
    (TOO_LARGE, 413, "invalid_request_error", openai.APIStatusError, anthropic.ContentTooLargeError, False),
    (
        ResourceExhausted("full", retry_after_seconds=0.001),
        429,
        "rate_limit_error",
        openai.RateLimitError,
        anthropic.RateLimitError,
        True,
    ),
    (
        RuntimeError("a bug"),
        500,
        "api_error",
        openai.InternalServerError,
        anthropic.InternalServerError,
        True,
    ),
    (
        Internal("no", reason=REQUEST_FAILED),
        500,
        "api_error",
        openai.InternalServerError,
        anthropic.InternalServerError,
        False,
    ),
    (
        Unavailable("no worker", retry_after_seconds=0.001),
        503,
        "overloaded_error",
        openai.InternalServerError,
        anthropic.ServiceUnavailableError,
        True,
    ),
    (
        DeadlineExceeded("late"),
        504,
        "timeout_error",
        openai.InternalServerError,
        anthropic.GatewayTimeoutError,
        True,
    ),
]


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize(
    ("error", "status", "kind", "openai_error", "anthropic_error", "is_repeated"),
    RAISED,
    ids=[f"{status} {error!r:.20}" for error, status, *_ in RAISED],
)
async def test_an_error_is_raised_and_repeated_as_its_status_says(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    sdk: str,
    error: Exception,
    status: int,
    kind: str,
    openai_error: type[Exception],
    anthropic_error: type[Exception],
    is_repeated: bool,
) -> None:
    clients, num_calls = await connect(), 0

    async def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise error

    monkeypatch.setattr(GenerationServicer, "joined_model", fail)
    with pytest.raises(either("APIStatusError")) as caught:
        await clients.ask(sdk, max_retries=1)
    raised = caught.value
    if sdk == "openai":
        kind = "server_error" if status == 500 else kind
    assert (raised.status_code, raised.type, num_calls) == (status, kind, 1 + is_repeated)
    assert raised.request_id == raised.response.headers["x-request-id"]
    assert float(raised.response.headers.get("retry-after", 0)) <= 120
    assert type(raised) is (openai_error if sdk == "openai" else anthropic_error)


@pytest.mark.parametrize("sdk", SDKS)
async def test_an_unknown_model_is_not_found(connect: Connect, sdk: str) -> None:
    with pytest.raises(either("NotFoundError"), match="is not served here") as caught:
        await (await connect()).ask(sdk, model="other")
    assert caught.value.type == "not_found_error"


@pytest.mark.parametrize(
    ("sdk", "words"),
    [
        ("openai", "this model's maximum context length is 64 tokens"),
        ("anthropic", r"prompt is too long: \d{3} tokens > 63 maximum"),
    ],
)
async def test_agents_see_that_their_conversation_is_too_long(connect: Connect, sdk: str, words: str) -> None:
    with pytest.raises(either("BadRequestError"), match=words) as caught:
        await (await connect()).ask(sdk, messages=[{"role": "user", "content": "x" * 100}])
    assert caught.value.type == "invalid_request_error"
    if sdk == "openai":
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("sdk", SDKS)
async def test_the_key_of_either_client_is_known(connect: Connect, tmp_path: Path, sdk: str) -> None:
    keys, [key] = write_keys(tmp_path, Tenant("blue"))
    clients = await connect(key, api_keys_file=keys)
    await clients.ask(sdk)
    wrong: Any = (clients.openai if sdk == "openai" else clients.anthropic).with_options(api_key="wrong")
    with pytest.raises(either("AuthenticationError")) as caught:
        await wrong.models.list()
    # Errors of other routes have OpenAI's form, in which the type has the same place.
    assert caught.value.type == "authentication_error"


@pytest.mark.parametrize("sdk", SDKS)
async def test_an_error_in_the_middle_of_a_stream_ends_its_reader(
    connect: Connect, pair: Any, fault: Any, sdk: str
) -> None:
    pair.change("decode", fault=fault(2, FailedPrecondition("scripted")))
    stream = await (await connect()).ask(sdk, stream=True)
    with pytest.raises(either("APIError"), match="refused: scripted") as caught:
        _ = [event async for event in stream]
    assert caught.value.type == "invalid_request_error"
