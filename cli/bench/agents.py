"""Sessions of coding agents: each prompt repeats all earlier text, after a pause of a tool or a person.

Steps, new tokens and pauses have the log-normal distributions that were fitted to the medians and 90th
percentiles of TraceLab (arXiv 2606.30560), 4,265 sessions of coding agents.
"""

from __future__ import annotations

import random

from quire.cli.bench.config import BenchConfig
from quire.cli.bench.workload import BenchRequest, Turn, options_of
from quire.client import ModelInfo
from quire.simulator.calibrate import vocabulary_of

STEPS = (2.71, 1.71)
"""Location and width of the logarithm, here and below."""
NEW_TOKENS = (6.57, 1.17)
TOOL_SECONDS = (-1.20, 2.98)
PERSON_SECONDS = (4.43, 2.10)
PERSON_SHARE = 0.12
"""Share of steps that a person begins: a session has 84 steps on average, 74 of them after tools."""


def agent_requests(config: BenchConfig, model: ModelInfo) -> list[BenchRequest]:
    """Return the first steps of sessions that together have the requested number of steps.

    The warm-up requests come first, without further steps. A session ends before it exceeds the model.
    """
    rng = random.Random(f"agents {config.seed}")
    warmups = [_session(config, model, rng, max_steps=1) for _ in range(config.num_warmups)]
    sessions, num_left = [], config.num_requests
    while num_left:
        sessions.append(_session(config, model, rng, max_steps=num_left))
        num_left -= 1 + len(sessions[-1].later_turns)
    return warmups + sessions


def _session(config: BenchConfig, model: ModelInfo, rng: random.Random, max_steps: int) -> BenchRequest:
    room = model.max_model_len - config.output_len
    if room < 1:
        raise ValueError(f"output-len ({config.output_len}) exceeds the model's {model.max_model_len} tokens")
    vocabulary, turns = vocabulary_of(model), list[Turn]()
    for _ in range(min(max_steps, _draw(rng, STEPS))):
        num_new = min(_draw(rng, NEW_TOKENS), room) if not turns else _draw(rng, NEW_TOKENS)
        if num_new > room:
            break
        pause = rng.lognormvariate(*(PERSON_SECONDS if rng.random() < PERSON_SHARE else TOOL_SECONDS))
        turns.append(Turn(pause / (config.trace_speed or 1), rng.choices(vocabulary, k=num_new)))
        room -= num_new + config.output_len
    options = options_of(config, config.output_len)
    return BenchRequest(turns[0].token_ids, options, later_turns=turns[1:])


def _draw(rng: random.Random, log_normal: tuple[float, float]) -> int:
    return max(1, round(rng.lognormvariate(*log_normal)))
