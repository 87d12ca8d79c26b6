"""The asyncio client: many streams at once, each with a deadline. Needs a running server: ./run"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing

from quire.client import AsyncClient, Message, QuireError

NUM_REQUESTS = 16


async def ask(client: AsyncClient, number: int) -> tuple[str, float]:
    """Return an answer and the seconds until its first token."""
    question = f"the code of the lantern is {100 + number}. what is the code of the lantern?"
    messages: list[Message] = [{"role": "user", "content": question}]
    begin, first, pieces = time.perf_counter(), 0.0, []
    # aclosing cancels the request at once if this task is cancelled or leaves the loop.
    async with aclosing(client.stream(messages, max_tokens=32, temperature=0, timeout=30)) as deltas:
        async for delta in deltas:
            first = first or time.perf_counter() - begin
            pieces.append(delta.text)
    return "".join(pieces), first


async def main() -> None:
    async with AsyncClient("127.0.0.1:8500") as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(NUM_REQUESTS)))
        for text, ttft_seconds in answers:
            print(f"{ttft_seconds * 1000:6.1f} ms  {text}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except QuireError as error:
        sys.exit(f"{type(error).__name__}: {error}")
