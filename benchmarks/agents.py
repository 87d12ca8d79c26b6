"""Measures how much of the prompts of coding agents a stack with small pools computes, and its TTFT.

    python -m quire.benchmarks.agents

Agents send sessions as ``quire bench serve --dataset agents`` does, one after another, and some steps wait
for sub-agents instead of a tool. Times are divided by ``--speed`` and lengths by ``--scale``. The same
sessions are sent under each rule, to a new stack:

* ``last-use``: the workers evict what was used least recently.
* ``5-minutes``: besides, a session's blocks are dropped when it has been idle for 5 minutes.
* ``sessions-end``: besides, clients say when a session or a sub-agent has ended.

``clairvoyant`` is a bound: what one pool of the size of all would compute of the requests under the first
rule if it evicted first what is used again last (Belady). Its TTFT follows from the tokens by the line that
fits the measured ones best, so it is an estimate.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import linear_regression
from typing import Annotated, Any, NamedTuple

from quire.benchmarks.harness.options import OneOf
from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.random_llamas import CACHE, random_llama
from quire.benchmarks.harness.rounds import show_progress
from quire.benchmarks.harness.tables import table
from quire.benchmarks.live_replay import workers
from quire.cli.bench.agents import NEW_TOKENS, PERSON_SECONDS, PERSON_SHARE, STEPS, TOOL_SECONDS
from quire.cli.bench.load import send
from quire.cli.bench.summary import OK, RequestRecord, percentile
from quire.cli.bench.workload import BenchRequest
from quire.client import AsyncClient
from quire.kvindex.block_hash import SHARED, block_hashes, root_hash
from quire.protos import worker_pb2
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import RunningStack, local_stack
from quire.services.router.config import RouterConfig
from quire.services.worker.config import WorkerConfig

RULES = ("last-use", "5-minutes", "sessions-end")
TIME_TO_LIVE_SECONDS = 300.0
FIRST_TOKENS = 6000
"""Tokens that a session's first prompt has besides: the agent's instructions and tools, and the project's."""
SUB_AGENT_SHARE = 0.03
"""Share of the tools that are sub-agents, which is an assumption, like the next two numbers."""
MOST_SUB_AGENTS = 3
SUB_AGENT_STEPS = (2.08, 1.0)
"""Location and width of the logarithm: 8 steps in the median."""
NEXT_SESSION_SECONDS = 60.0
MAX_MODEL_LEN = 16384
BLOCK_TOKENS = WorkerConfig.block_size
WARM_UP_SHARE = 0.3


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    seconds: Annotated[float, "length of each run; its first 30 %% do not count"] = 80.0
    agents: Annotated[int, "agents at work at a time"] = 12
    speed: Annotated[float, "pauses are divided by this"] = 20.0
    scale: Annotated[float, "numbers of tokens are divided by this"] = 8.0
    answer_tokens: int = 16
    prefill: int = 1
    decode: int = 1
    blocks: Annotated[int, "blocks of a worker's pool"] = 1024
    seed: int = 0
    rules: Annotated[tuple[str, ...], OneOf(RULES)] = RULES
    folder: Path = CACHE


class Step(NamedTuple):
    """A step of a session: it waits for a tool, a person or sub-agents, and adds tokens to the prompt."""

    pause_seconds: float
    sub_agents: Sequence[Sequence[Step]]
    token_ids: Sequence[int]


class Sent(NamedTuple):
    """A request, its prompt, and its outcome."""

    prompt: Sequence[int]
    record: RequestRecord

    @property
    def num_computed(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.record.prompt_tokens - self.record.cached_prompt_tokens


def make_session(options: Options, rng: random.Random, *, is_sub_agent: bool = False) -> list[Step]:
    """Return a session that fits the model."""
    vocabulary, room, steps = range(2, 4096), MAX_MODEL_LEN, list[Step]()
    for index in range(round(rng.lognormvariate(*(SUB_AGENT_STEPS if is_sub_agent else STEPS))) + 1):
        first = 0 if index or is_sub_agent else FIRST_TOKENS
        num_new = 1 + round((first + rng.lognormvariate(*NEW_TOKENS)) / options.scale)
        if (room := room - num_new - options.answer_tokens) < 0:
            break
        is_person = rng.random() < PERSON_SHARE
        num_helpers = 0
        if index and not is_sub_agent and not is_person and rng.random() < SUB_AGENT_SHARE:
            num_helpers = rng.randint(1, MOST_SUB_AGENTS)
        helpers = [make_session(options, rng, is_sub_agent=True) for _ in range(num_helpers)]
        pause = rng.lognormvariate(*(PERSON_SECONDS if is_person else TOOL_SECONDS)) if index else 0.0
        steps.append(Step(pause / options.speed, helpers, rng.choices(vocabulary, k=num_new)))
    return steps


@dataclass(eq=False)
class Agents:
    """Sends sessions, and follows a rule.

    Attributes:
        forget: drops the blocks of these tokens on all workers.
        sent: the requests so far.
    """

    client: AsyncClient
    options: Options
    rule: str
    forget: Callable[[Sequence[int]], Awaitable[None]]
    sent: list[Sent]

    async def work(self, number: int) -> None:
        """Send one session after another, until cancelled."""
        rng = random.Random(f"{self.options.seed} {number}")
        await asyncio.sleep(rng.random() * NEXT_SESSION_SECONDS / self.options.speed)
        while True:
            await self._session(make_session(self.options, rng), f"{number}-{rng.random()}")
            await asyncio.sleep(NEXT_SESSION_SECONDS / self.options.speed)

    async def _session(self, steps: Sequence[Step], name: str) -> None:
        tokens: list[int] = []
        ttl = TIME_TO_LIVE_SECONDS / self.options.speed if self.rule == "5-minutes" else inf
        for index, step in enumerate(steps):
            helpers = [self._session(each, f"{name}-{index}-{i}") for i, each in enumerate(step.sub_agents)]
            await asyncio.sleep(min(step.pause_seconds, ttl))
            if step.pause_seconds > ttl:
                await self.forget(tokens)
                await asyncio.sleep(step.pause_seconds - ttl)
            await asyncio.gather(*helpers)
            tokens += step.token_ids
            begin = time.perf_counter()
            options: Any = {"max_tokens": self.options.answer_tokens, "ignore_eos": True, "session": name}
            record = await send(self.client, BenchRequest(tuple(tokens), options), begin)
            assert record.status == OK, record.status
            self.sent.append(Sent(tuple(tokens), record))
            tokens += record.token_ids
        if self.rule == "sessions-end":
            await self.client.end_session(name)


@asynccontextmanager
async def forgetting(stack: RunningStack) -> AsyncIterator[Callable[[Sequence[int]], Awaitable[None]]]:
    """Yield a function that drops the blocks of tokens on all workers."""
    async with workers(stack) as stubs:
        info = await next(iter(stubs.values())).GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        root = root_hash(info.cache_descriptor, stack.caller.secret, SHARED)

        async def forget(tokens: Sequence[int]) -> None:
            hashes = block_hashes(root, tokens, BLOCK_TOKENS)
            request = worker_pb2.ForgetBlocksRequest(block_hashes=hashes)
            await asyncio.gather(*(stub.ForgetBlocks(request) for stub in stubs.values()))

        yield forget


async def measure(stack: RunningStack, options: Options, rule: str) -> list[Sent]:
    """Return the requests of one run, in the order in which they were sent."""
    sent: list[Sent] = []
    async with AsyncClient(stack.address) as client, forgetting(stack) as forget:
        agents = Agents(client, options, rule, forget, sent)
        working = [asyncio.ensure_future(agents.work(number)) for number in range(options.agents)]
        await asyncio.wait(working, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        for each in working:
            each.cancel()
        for outcome in await asyncio.gather(*working, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    return sorted(sent, key=lambda each: each.record.start_seconds)


def clairvoyant(sent: Sequence[Sent], num_blocks: int) -> list[int]:
    """Return how many tokens of each prompt a pool computes that evicts first what is used again last."""
    chains = [block_hashes(b"", (*each.prompt, *each.record.token_ids), BLOCK_TOKENS) for each in sent]
    uses: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, (each, chain) in reversed(list(enumerate(zip(sent, chains, strict=True)))):
        for block in chain[: len(each.prompt) // BLOCK_TOKENS]:
            uses[block].append(index)
    next_use: dict[bytes, float] = {}
    latest: list[tuple[float, int, bytes]] = []
    computed = []
    for index, (each, chain) in enumerate(zip(sent, chains, strict=True)):
        num_full, num_cached = len(each.prompt) // BLOCK_TOKENS, 0
        while num_cached < num_full and chain[num_cached] in next_use:
            num_cached += 1
        computed.append(len(each.prompt) - min(num_cached * BLOCK_TOKENS, len(each.prompt) - 1))
        for position, block in enumerate(chain):
            while uses[block] and uses[block][-1] <= index:
                uses[block].pop()
            next_use[block] = uses[block][-1] if uses[block] else inf
            heapq.heappush(latest, (-next_use[block], -position, block))
        while len(next_use) > num_blocks:
            use, _, block = heapq.heappop(latest)
            if next_use.get(block) == -use:
                del next_use[block]
    return computed


def _row(rule: str, computed: Sequence[float], ttft: Sequence[float]) -> dict[str, Any]:
    ms = sorted(1000 * seconds for seconds in ttft)
    return {
        "rule": rule,
        "requests": len(ms),
        "computed_per_request": sum(computed) / len(computed),
        "ttft_p50_ms": percentile(ms, 50),
        "ttft_p90_ms": percentile(ms, 90),
    }


def _rows(runs: Mapping[str, list[Sent]], options: Options) -> list[dict[str, Any]]:
    rows = []
    for rule, sent in runs.items():
        begin = sent[0].record.start_seconds + WARM_UP_SHARE * options.seconds
        counted = [each for each in sent if each.record.start_seconds >= begin]
        computed = [each.num_computed for each in counted]
        ttft = [each.record.ttft_seconds for each in counted]
        rows.append(_row(rule, computed, ttft))
        if rule == RULES[0]:
            slope, intercept = linear_regression(computed, ttft)
            num_blocks = options.blocks * (options.prefill + options.decode)
            least = clairvoyant(sent, num_blocks)[-len(counted) :]
            bound = _row("clairvoyant", least, [intercept + slope * each for each in least])
    return [*rows, bound] if RULES[0] in runs else rows


@program
def main(options: Options) -> Report:
    """Run the sessions under each rule."""
    runs: dict[str, list[Sent]] = {}
    for rule in options.rules:
        config = LocalStackConfig(
            num_prefill=options.prefill,
            num_decode=options.decode,
            router=RouterConfig(port=0),
            worker=WorkerConfig(
                role="decode",
                model=str(random_llama("7m", options.folder, max_length=MAX_MODEL_LEN)),
                num_blocks=options.blocks,
            ),
            log_level="error",
        )
        with local_stack(config) as stack:
            runs[rule] = asyncio.run(measure(stack, options, rule))
        show_progress(f"{rule}: {len(runs[rule])} requests")
    rows = _rows(runs, options)
    columns = {
        "eviction": "{rule}",
        "requests": "{requests}",
        "computed tokens": "{computed_per_request:.0f}",
        "TTFT p50 (ms)": "{ttft_p50_ms:.0f}",
        "TTFT p90 (ms)": "{ttft_p90_ms:.0f}",
    }
    return Report([table("Sessions of agents", rows, columns)], {"rows": rows})


if __name__ == "__main__":
    main()
