"""The requests of a chaos run: many kinds, each of which has one right answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from quire.protos import inference_pb2 as pb

THINGS = (
    "lantern",
    "palace",
    "box",
    "dog",
    "cable",
    "pine",
    "egg",
    "fan",
    "dish",
    "bridge",
    "harbour",
    "violin",
)
QUALITIES = ("code", "height", "price", "age", "number", "score")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": list(THINGS)},
        "number": {"type": "integer"},
        "is_old": {"type": "boolean"},
    },
    "required": ["name", "number", "is_old"],
    "additionalProperties": False,
}


class Template(NamedTuple):
    """A request that is sent many times, and always gets the same answer."""

    kind: str
    generation: pb.Generation


def draw_templates(seed: int, num_of_each: int) -> list[Template]:
    """Return as many requests of each kind; the same arguments give the same requests."""
    templates = []
    for kind, draw in _DRAWS.items():
        for index in range(num_of_each):
            random = Random(f"request-{seed}-{kind}-{index}")
            generation = draw(random)
            if not generation.WhichOneof("prompt"):
                generation.text = _notes(random, random.randint(2, 30))
            templates.append(Template(kind, generation))
    return templates


def _notes(random: Random, num_notes: int) -> str:
    """Return notes and a question, as the demo model knows them; text repeats, so that n-grams match."""
    notes = [
        f"the {random.choice(QUALITIES)} of the {random.choice(THINGS)} is {random.randint(1, 999)}."
        for _ in range(num_notes)
    ]
    return " ".join([*notes, f"what is the {random.choice(QUALITIES)} of the {random.choice(THINGS)}?"])


def _stopping(random: Random, least: int, most: int) -> pb.StoppingParams:
    return pb.StoppingParams(max_tokens=random.randint(least, most), ignore_eos=True)


def _greedy(random: Random) -> pb.Generation:
    return pb.Generation(sampling=pb.SamplingParams(temperature=0.0), stopping=_stopping(random, 8, 160))


def _sampled(random: Random) -> pb.Generation:
    sampling = pb.SamplingParams(
        temperature=random.uniform(0.5, 1.5),
        top_p=random.uniform(0.7, 1.0),
        top_k=random.choice([0, 20]),
        min_p=random.choice([0.0, 0.02]),
        seed=random.getrandbits(32),
    )
    return pb.Generation(sampling=sampling, stopping=_stopping(random, 8, 160))


def _long_prompt(random: Random) -> pb.Generation:
    sampling = pb.SamplingParams(temperature=0.7, seed=random.getrandbits(32))
    return pb.Generation(
        text=_notes(random, random.randint(60, 120)), sampling=sampling, stopping=_stopping(random, 8, 40)
    )


def _samples(random: Random) -> pb.Generation:
    sampling = pb.SamplingParams(temperature=1.0, seed=random.getrandbits(32), n=random.randint(2, 4))
    if random.random() < 0.3:
        sampling.best_of = sampling.n + 1
    return pb.Generation(sampling=sampling, stopping=_stopping(random, 8, 80))


def _beams(random: Random) -> pb.Generation:
    beam = pb.BeamParams(width=random.randint(2, 4), length_penalty=random.choice([0.5, 1.0]))
    return pb.Generation(sampling=pb.SamplingParams(beam=beam), stopping=_stopping(random, 4, 40))


def _json(random: Random) -> pb.Generation:
    return pb.Generation(
        sampling=pb.SamplingParams(temperature=1.0, seed=random.getrandbits(32)),
        stopping=pb.StoppingParams(max_tokens=80),
        format=pb.ResponseFormat(json_schema=json.dumps(SCHEMA)),
    )


def _penalties(random: Random) -> pb.Generation:
    sampling = pb.SamplingParams(
        temperature=random.choice([0.0, 0.9]),
        seed=random.getrandbits(32),
        presence_penalty=random.uniform(-1, 1),
        frequency_penalty=random.uniform(0, 1),
        repetition_penalty=random.uniform(0.9, 1.3),
        logit_bias={random.randrange(2, 1900): random.uniform(-5, 5) for _ in range(8)},
        bad_words=["the code", "palace"],
    )
    return pb.Generation(sampling=sampling, stopping=_stopping(random, 8, 120))


def _stops(random: Random) -> pb.Generation:
    stopping = pb.StoppingParams(
        max_tokens=120, min_tokens=random.randint(0, 30), stop_strings=[".", "of the"], ignore_eos=True
    )
    return pb.Generation(
        sampling=pb.SamplingParams(temperature=1.0, seed=random.getrandbits(32)),
        stopping=stopping,
        response=pb.ResponseOptions(keep_stop_string=random.random() < 0.5),
    )


def _logprobs(random: Random) -> pb.Generation:
    generation = _sampled(random)
    generation.response.logprobs = random.randint(0, 5)
    if random.random() < 0.3:
        generation.response.prompt_logprobs = 2
    return generation


_DRAWS: Mapping[str, Callable[[Random], pb.Generation]] = {
    "greedy": _greedy,
    "sampled": _sampled,
    "long prompt": _long_prompt,
    "samples": _samples,
    "beams": _beams,
    "json": _json,
    "penalties": _penalties,
    "stops": _stops,
    "logprobs": _logprobs,
}
KINDS = tuple(_DRAWS)
