"""A router with its HTTP API in front of scripted workers, and the clients that people use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI

Start = Callable[..., Coroutine[Any, Any, ClientSession]]


@pytest.fixture
async def start(pair: Any) -> AsyncIterator[Start]:
    """Return a function that starts the router and returns a session whose paths begin at its address."""
    sessions: list[ClientSession] = []

    async def start(**options: Any) -> ClientSession:
        await pair.start(http_port=0, **options)
        sessions.append(ClientSession(f"http://{pair.running.http.address}"))
        return sessions[-1]

    yield start
    for session in sessions:
        await session.close()


@pytest.fixture
async def http(start: Start) -> ClientSession:
    """Return a session with a router of the default settings."""
    return await start()


@pytest.fixture
async def client(pair: Any, http: ClientSession) -> AsyncIterator[AsyncOpenAI]:
    """Return OpenAI's client, which is told not to try again."""
    url = f"http://{pair.running.http.address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
