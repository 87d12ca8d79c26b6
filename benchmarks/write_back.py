"""The second turn of a conversation, with and without write-back.

    python -m quire.benchmarks.write_back [--conversations 10]

A router, a prefill and a decode worker on this machine serve a random model of 5 M parameters. The first
turn is 256 tokens, its answer 192 more. The second turn begins a second later with all that and 32 tokens.
Without write-back the prefill worker pulls the answer's blocks from the decode worker, or computes them,
whichever the router takes to be faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

from quire.client import AsyncClient
from quire.models.random_model import make_random_model
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

PROMPT_TOKENS, ANSWER_TOKENS, NEXT_TOKENS = 256, 192, 32
PAUSE_SECONDS = 1.0
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


class Row(NamedTuple):
    """Medians over the second turns."""

    name: str
    ttft_ms: float
    cached_tokens: float
    pulled_blocks: float


async def converse(address: str, name: str, num_conversations: int) -> Row:
    random = Random(0)
    ttfts, cached, pulled = [], [], []
    async with AsyncClient(address) as client:
        for number in range(-1, num_conversations):  # the first one warms up
            prompt = random.choices(range(2, 300), k=PROMPT_TOKENS)
            answer = await client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=ANSWER_TOKENS)
            await asyncio.sleep(PAUSE_SECONDS)
            prompt += [*answer.token_ids, *random.choices(range(2, 300), k=NEXT_TOKENS)]
            start = time.perf_counter()
            ttft = 0.0
            async for delta in client.stream(prompt, temperature=0.0, ignore_eos=True, max_tokens=4):
                ttft = ttft or 1000 * (time.perf_counter() - start)
                usage = delta.usage
            assert usage is not None
            if number >= 0:
                ttfts.append(ttft)
                cached.append(usage.cached_prompt_tokens)
                pulled.append(usage.blocks_pulled)
    return Row(name, median(ttfts), median(cached), median(pulled))


def measure(num_conversations: int) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_random_model("llama", Path(folder), **MODEL))
        for name, write_back in (("without", False), ("with write-back", True)):
            config = LocalStackConfig(
                router=RouterConfig(port=0, write_back=write_back),
                worker=WorkerConfig(role="decode", model=model, dtype="float32", threads=1),
                log_level="error",
            )
            with local_stack(config) as stack:
                rows.append(asyncio.run(converse(stack.address, name, num_conversations)))
    return rows


def main() -> None:
    """Print a table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(description="Time to the first token of second turns.")
    parser.add_argument("--conversations", type=int, default=10)
    rows = measure(parser.parse_args().conversations)
    print(f"{'':<18}{'TTFT p50':>10}{'cached tokens':>16}{'pulled blocks':>16}")
    for row in rows:
        print(f"{row.name:<18}{row.ttft_ms:>7.1f} ms{row.cached_tokens:>16.0f}{row.pulled_blocks:>16.0f}")
    print(json.dumps({"benchmark": "write_back", "results": [row._asdict() for row in rows]}))


if __name__ == "__main__":
    main()
