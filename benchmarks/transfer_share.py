"""The share of the transfer in the time to the first tokens of an answer, one request at a time.

    python -m quire.benchmarks.transfer_share
    python -m quire.benchmarks.transfer_share --model 100m --tokens 512,4096 --rounds 3

A router, one prefill and one decode worker serve a random Llama. A block is pushed as soon as it is full,
while the prompt is still being computed, and the prefill worker's first token goes to the client at once.
What is left of the push then ("transfer") delays the second token only. The table has, for each transport and
length of the prompt, the medians of the client's times to the first and to the second token, the mean time of
the transfer after the prompt was computed, and its share in the time to the second token. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, get_args
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from quire.benchmarks.peers.random_llamas import SIZES, make_random_llama
from quire.client import AsyncClient
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

Transport = Literal["shared", "grpc"]
ANSWER_TOKENS = 4
PHASES = ("credit_wait", "transfer")
"""What is observed between the end of a prompt's computation and the end of its push."""


class Request(NamedTuple):
    """One request: seconds to its first and second token, and of the transfer after its computation."""

    first: float
    second: float
    transfer: float


def phase_seconds(stack: RunningStack) -> float:
    """Return the sum of the phases' times on the prefill worker since its start."""
    url = f"http://127.0.0.1:{stack.ready['prefill-0'].metrics_port}/metrics"
    with urlopen(url, timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "quire_request_phase_seconds_sum" and sample.labels["phase"] in PHASES
    )


async def measure(stack: RunningStack, num_tokens: int, seed: int) -> Request:
    """Send one request whose prompt no worker has seen."""
    prompt = Random(f"{seed} {num_tokens}").choices(range(2, 300), k=num_tokens)
    times: list[float] = []
    async with AsyncClient(stack.address, timeout=600) as client:
        await client.generate(prompt[:16], max_tokens=1)  # opens the connection
        before = phase_seconds(stack)
        begin = time.perf_counter()
        async for delta in client.stream(prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True):
            times += [time.perf_counter() - begin] * len(delta.token_ids)
    return Request(times[0], times[1], phase_seconds(stack) - before)


def requests(model: str, transport: Transport, lengths: list[int], rounds: int) -> dict[int, list[Request]]:
    """Return the requests by the length of their prompts."""
    worker = WorkerConfig(role="decode", model=model, dtype="float32", num_blocks=1024, transport=transport)
    router = RouterConfig(port=0)
    config = LocalStackConfig(num_prefill=1, num_decode=1, router=router, worker=worker, log_level="error")
    found: dict[int, list[Request]] = {length: [] for length in lengths}
    with local_stack(config) as stack:
        for round_index in range(-1, rounds):  # the first one warms up
            for length in lengths:
                request = asyncio.run(measure(stack, length, round_index))
                if round_index >= 0:
                    found[length].append(request)
    return found


def main() -> None:
    """Print the table and, last, one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m quire.benchmarks.transfer_share",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=SIZES, default="7m")
    parser.add_argument("--tokens", default="512,1024,2048,4000", help="lengths of the prompts")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    lengths = [int(each) for each in options.tokens.split(",")]
    results: list[dict[str, Any]] = []
    print(
        f"{'transport':<12}{'prompt':>8}{'first token':>14}{'second token':>14}{'transfer':>12}{'share':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_random_llama(Path(folder) / "model", SIZES[options.model]))
        for transport in get_args(Transport):
            for length, measured in requests(model, transport, lengths, options.rounds).items():
                first = median(each.first for each in measured)
                second = median(each.second for each in measured)
                transfer = fmean(each.transfer for each in measured)
                share = transfer / second
                results.append(
                    {
                        "transport": transport,
                        "tokens": length,
                        "first_token_ms": round(1000 * first, 2),
                        "second_token_ms": round(1000 * second, 2),
                        "transfer_ms": round(1000 * transfer, 2),
                        "share": round(share, 4),
                    }
                )
                print(
                    f"{transport:<12}{length:>8}{1000 * first:>11.1f} ms{1000 * second:>11.1f} ms"
                    f"{1000 * transfer:>9.1f} ms{share:>9.1%}",
                    flush=True,
                )
    print(json.dumps({"benchmark": "transfer_share", "model": options.model, "results": results}))


if __name__ == "__main__":
    main()
