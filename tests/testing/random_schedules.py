"""Random requests, added and aborted between steps of a small pool, against each request alone."""

from __future__ import annotations

from random import Random
from typing import Any

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.speculator import Speculator
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import BeamParams
from tests.testing.tiny_engine import Outputs, add_tokens, make_engine, make_prompt, make_request, run


def check_random_schedule(
    model: LoadedModel, seed: int, *, is_swapped: bool, speculator: Speculator | None = None
) -> None:
    """Check that preemptions, forks, beams and aborts change no token.

    Args:
        model: a model with blocks of 16 tokens.
        seed: decides the requests and their order.
        is_swapped: whether preempted sequences are swapped out; otherwise they are computed again.
        speculator: proposes draft tokens; None: there are none.
    """
    engine = make_engine(
        model,
        num_blocks=16,
        num_swap_blocks=60,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        prefers_swap=is_swapped,
        speculator=speculator,
    )
    found, aborted = _run_at_random(engine, _make_requests(Random(seed)), Random(seed))
    assert engine.preemption.counts[not is_swapped] > 0
    assert len(aborted) < 8
    for request in _make_requests(Random(seed)):
        if request.attempt_id not in aborted:
            expected = run(make_engine(model), request)
            assert expected == {key: tokens for key, tokens in found.items() if key[0] == request.attempt_id}


def _make_requests(random: Random) -> list[Sequence]:
    """Return requests of all kinds, some of which begin alike."""
    requests = []
    for number in range(8):
        kind: dict[str, Any] = random.choice(
            [{"temperature": 0.0}, {"temperature": 1.0, "seed": number, "n": 3}, {"beam": BeamParams(3)}]
        )
        prompt = [*make_prompt(random.choice([1, 16, 40, 90]), random.randint(0, 1)), number + 2]
        requests.append(make_request(f"r{number}", prompt, max_tokens=random.randint(1, 50), **kind))
    return requests


def _run_at_random(engine: Engine, requests: list[Sequence], random: Random) -> tuple[Outputs, set[str]]:
    """Add and abort requests between steps; return the tokens of each sequence, and what was aborted."""
    outputs: Outputs = {}
    aborted: set[str] = set()
    waiting = list(requests)
    while waiting or not engine.is_idle:
        if waiting and random.random() < 0.4:
            engine.add_request(waiting.pop(0))
        if random.random() < 0.02:
            victim = random.choice(requests)
            if victim not in waiting and not victim.status.is_finished:
                engine.abort(victim.attempt_id)
                aborted.add(victim.attempt_id)
        for update in engine.step():
            add_tokens(outputs, update)
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    return outputs, aborted
