"""The asyncio client against a server on the loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from quire.client import AsyncClient, Cancelled, Overloaded, Unavailable
from quire.rpc import errors as service_errors

WAIT_SECONDS = 10.0


@pytest.fixture
async def client(fake_generation: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(fake_generation.address, timeout=WAIT_SECONDS) as client:
        yield client


async def test_generate_chat_and_stream_agree(client: AsyncClient, fake_generation: Any) -> None:
    whole = await client.generate("x", max_tokens=3)
    chat = await client.chat([{"role": "user", "content": "x"}])
    deltas = [delta async for delta in client.stream("x")]
    assert whole == chat
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].usage == whole.usage
    assert fake_generation.requests[0].stopping.max_tokens == 3


async def test_tokenize_detokenize_and_model_info(client: AsyncClient) -> None:
    assert await client.detokenize(await client.tokenize("quire é")) == "quire é"
    assert (await client.model_info()).block_size == 16


async def test_breaking_out_of_the_loop_cancels_the_request(
    client: AsyncClient, fake_generation: Any
) -> None:
    fake_generation.hangs = True
    async with aclosing(client.stream("x")) as deltas:
        async for _ in deltas:
            break
    assert await asyncio.to_thread(fake_generation.cancelled.wait, WAIT_SECONDS)


async def begun_stream(client: AsyncClient) -> asyncio.Task[None]:
    """Return a task that reads a stream, after its first message."""
    first = asyncio.Event()

    async def consume() -> None:
        async for _ in client.stream("x"):
            first.set()

    task = asyncio.create_task(consume())
    await asyncio.wait_for(first.wait(), WAIT_SECONDS)
    return task


async def test_cancelling_the_task_cancels_the_request(client: AsyncClient, fake_generation: Any) -> None:
    fake_generation.hangs = True
    task = await begun_stream(client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(fake_generation.cancelled.wait, WAIT_SECONDS)


async def test_closing_the_client_ends_its_calls_with_an_error(
    client: AsyncClient, fake_generation: Any
) -> None:
    """A task group would ignore the end of a task as if it had been cancelled."""
    fake_generation.hangs = True
    task = await begun_stream(client)
    await client.close()
    with pytest.raises(Cancelled, match="the client was closed"):
        await task
    for call in (client.generate("x"), anext(client.stream("x")), client.end_session("s")):
        with pytest.raises(Cancelled, match="the client was closed"):
            await call


@pytest.mark.parametrize("method", ["generate", "end_session"])
async def test_closing_the_client_ends_a_call_that_waits_for_its_answer(method: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = AsyncClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout=WAIT_SECONDS)
        task = asyncio.create_task(getattr(client, method)("x"))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(Cancelled, match="the client was closed"):
            await task


async def test_errors_are_typed(client: AsyncClient, fake_generation: Any) -> None:
    fake_generation.errors = [service_errors.ResourceExhausted("full", retry_after_seconds=2)] * 2
    with pytest.raises(Overloaded) as raised:
        await client.generate("x")
    assert raised.value.retry_after == 2
    with pytest.raises(Overloaded):
        async for _ in client.stream("x"):
            pass


async def test_unavailable_is_retried_before_the_first_message(
    client: AsyncClient, fake_generation: Any
) -> None:
    fake_generation.errors = [service_errors.Unavailable("starting")]
    assert len([delta async for delta in client.stream("x")]) == 3


async def test_no_server_is_unavailable() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=WAIT_SECONDS) as client:
        with pytest.raises(Unavailable):
            await client.model_info()
