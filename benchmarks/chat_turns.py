"""Measures how much of each turn of a chat is reused, and what that saves, if any worker gets each turn.

    python -m quire.benchmarks.chat_turns --chats 20

Two prefill and two decode workers serve the demo model. The workers of each of the four turns are chosen at
random, so most of the needed blocks are on other workers. Each turn is compared with an oracle, which counts
the full blocks on any worker, and with the time of an uncached prompt of the same length. All answers are
checked.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Annotated, Any, cast

from rich.console import Console
from rich.progress import track

from quire.benchmarks.harness.program import Report, program
from quire.benchmarks.harness.tables import table
from quire.client import AsyncClient, Message, Usage
from quire.models.notes import HELD_OUT_SEEDS, answer, question, sample_notes, text
from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Pulls
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.router.config import RouterConfig

NUM_TURNS, NUM_FACTS, MAX_TOKENS, BLOCK_TOKENS = 4, 100, 16, 16
PAUSE_SECONDS = 0.2
"""Pause between turns: no user answers faster, and the last block reaches the index in this time."""


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    chats: Annotated[int, "number of chats"] = 20


@program
def main(options: Options) -> Report:
    """Measure the turns with and without pulls."""
    rows: list[dict[str, Any]] = []
    for pulls in (Pulls.MEASURED, Pulls.NEVER):
        placing = PolicyConfig(policy=Policy.LOAD, pulls=pulls, local_prefill_tokens=0)
        config = LocalStackConfig(
            num_prefill=2, num_decode=2, router=RouterConfig(port=0, placing=placing), log_level="error"
        )
        with local_stack(config) as stack:
            turns = asyncio.run(_measure(stack.address, options.chats, pulls.value))
        rows += [{"pulls": pulls.value, "turn": number, **turn} for number, turn in enumerate(turns, start=1)]
    columns = {
        "pulls": "{pulls}",
        "turn": "{turn}",
        "prompt": "{prompt_tokens:.0f}",
        "cached": "{cached_share:.1%}",
        "oracle (ceiling)": "{oracle_share:.1%}",
        "pulled blocks": "{pulled_blocks:.1f}",
        "TTFT (ms)": "{ttft_ms:.0f}",
        "unseen (ms)": "{ttft_unseen_ms:.0f}",
        "right": "{right_share:.0%}",
    }
    return Report([table("Chats of four turns, random placement, 2P 2D", rows, columns)], {"rows": rows})


async def _measure(address: str, num_chats: int, name: str) -> list[dict[str, Any]]:
    turns: list[list[dict[str, float]]] = [[] for _ in range(NUM_TURNS)]
    async with AsyncClient(address) as client:
        await client.generate([5] * 64, max_tokens=2)
        for chat in track(range(num_chats), name, console=Console(stderr=True), transient=True):
            rng = Random(5 * HELD_OUT_SEEDS + chat)
            notes = sample_notes(rng, NUM_FACTS)
            messages: list[Message] = []
            held: list[int] = []
            for turn in range(NUM_TURNS):
                asked = notes[turn]
                first = f"{text(notes)} " if turn == 0 else ""
                messages.append(cast("Message", {"role": "user", "content": first + question(asked)}))
                prompt = await client.tokenize(messages)
                seconds, usage, tokens = await _timed(client, prompt)
                said = (await client.detokenize(tokens)).strip()
                new_seconds, _, _ = await _timed(client, [rng.randrange(300, 900) for _ in prompt])
                num_common = next(
                    (i for i, (a, b) in enumerate(zip(prompt, held, strict=False)) if a != b),
                    min(len(prompt), len(held)),
                )
                turns[turn].append(
                    {
                        "prompt": len(prompt),
                        "cached": usage.cached_prompt_tokens,
                        "oracle": num_common // BLOCK_TOKENS * BLOCK_TOKENS,
                        "pulled": usage.blocks_pulled,
                        "seconds": seconds,
                        "new_seconds": new_seconds,
                        "is_right": answer(asked) in said,
                    }
                )
                held = [*prompt, *tokens][:-1]
                messages.append(cast("Message", {"role": "assistant", "content": answer(asked)}))
                await asyncio.sleep(PAUSE_SECONDS)
    return [_summary(turn) for turn in turns]


async def _timed(client: AsyncClient, prompt: list[int]) -> tuple[float, Usage, list[int]]:
    begin, first, usage = time.perf_counter(), None, None
    tokens: list[int] = []
    async for delta in client.stream(prompt, max_tokens=MAX_TOKENS, temperature=0.0):
        first = first or time.perf_counter()
        tokens += delta.token_ids
        usage = delta.usage or usage
    assert first is not None
    assert usage is not None
    return first - begin, usage, tokens


def _summary(turn: list[dict[str, float]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(each[name] for each in turn)

    return {
        "prompt_tokens": total("prompt") / len(turn),
        "cached_share": round(total("cached") / total("prompt"), 4),
        "oracle_share": round(total("oracle") / total("prompt"), 4),
        "pulled_blocks": total("pulled") / len(turn),
        "ttft_ms": round(median(each["seconds"] for each in turn) * 1000, 1),
        "ttft_unseen_ms": round(median(each["new_seconds"] for each in turn) * 1000, 1),
        "right_share": total("is_right") / len(turn),
    }


if __name__ == "__main__":
    main()
