"""Random requests over every field, usual values and extreme ones, for gRPC and for HTTP.

``FIELDS`` and ``PARTS`` have every field of a ``quire.v1.Generation``, so that none is forgotten: a test
compares them with the proto.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from quire.protos import inference_pb2 as pb
from quire.sampling.parameter import table
from quire.sampling.params import SamplingParams
from tests.soak.fuzz.formats import random_grammar, random_regex, random_schema

ODD_SHARE = 0.06
"""Share of values that are drawn from the extremes."""
VOCAB_SIZE = 2048
WORDS = ["the", "code", "of", "lantern", "is", "417.", "what", "score", "\n", " ", "é", "日本", "🙂"]
NOT_A_NUMBER, INFINITE = float("nan"), float("inf")
Draw = Callable[[Random], Any]


class Field(NamedTuple):
    """How a field is drawn.

    Attributes:
        share: of the requests that have it.
        usual: values that a client would send.
        odd: values at the limits and beyond.
    """

    share: float
    usual: Draw
    odd: Draw


def field(share: float, usual: Draw, *odd: Any) -> Field:
    """Return a field whose extreme values are listed."""
    return Field(share, usual, (lambda random: random.choice(odd)) if odd else usual)


def _text(random: Random) -> str:
    return " ".join(random.choices(WORDS, k=random.randint(1, 60)))


def _ids(low: int, high: int) -> Draw:
    return lambda random: [random.randrange(2, VOCAB_SIZE) for _ in range(random.randint(low, high))]


def _floats(low: float, high: float) -> Draw:
    return lambda random: random.uniform(low, high)


def _integers(low: int, high: int) -> Draw:
    return lambda random: random.randint(low, high)


def _true(random: Random) -> bool:
    return True


def _bias(random: Random) -> dict[int, float]:
    return {random.randrange(VOCAB_SIZE): random.uniform(-100, 100) for _ in range(random.randint(1, 5))}


def _chat(random: Random) -> pb.Chat:
    roles = ["user"] if random.random() < 0.7 else ["system", "user", "assistant", "user"]
    return pb.Chat(messages=[pb.ChatMessage(role=role, content=_text(random)) for role in roles])


def _odd_chat(random: Random) -> pb.Chat:
    return random.choice(
        [
            pb.Chat(),
            pb.Chat(messages=[pb.ChatMessage(role="nobody", content="x")]),
            pb.Chat(messages=[pb.ChatMessage(role="user", more="{")]),
            pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], tools="{}"),
            pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], template_arguments="[]"),
            pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 200_000)]),
            pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 2000),
        ]
    )


def _received(random: Random) -> list[pb.ReceivedAnswer]:
    """Return what a client would send with the origin of another model: only a server knows its own."""
    return [pb.ReceivedAnswer(token_ids=_ids(1, 20)(random), num_characters=random.randint(0, 40))]


def _odd_received(random: Random) -> list[pb.ReceivedAnswer]:
    odd = pb.ReceivedAnswer(
        index=random.choice(_LIMITS_OF_INTEGERS),
        token_ids=random.choice(_LIMITS_OF_TOKENS),
        num_characters=random.choice(_LIMITS_OF_INTEGERS),
        is_finished=random.random() < 0.5,
    )
    return [odd] * random.choice([1, 2, 2000])


_LIMITS_OF_FLOATS = (-1.0, 0.0, 1e-30, 1e-6, 2000.0, 1e38, -1e38, NOT_A_NUMBER, INFINITE, -INFINITE)
_LIMITS_OF_INTEGERS = (0, 1, 65, 2**31 - 1, 2**32 - 1)
_LIMITS_OF_SIGNED = (0, -1, 4097, 2**31 - 1, -(2**31))
_LIMITS_OF_TOKENS: tuple[list[int], ...] = (
    [],
    [VOCAB_SIZE],
    [2**32 - 1],
    [1],
    list(range(VOCAB_SIZE)),
    [5] * 3000,
)
_STRINGS = ("", "\x00", "x" * 5000, "\u200b", "é" * 300)


def _fields_of_floats() -> dict[str, Field]:
    """Return how the floats of the table of parameters are drawn: in their ranges, but below 2."""
    fields = {}
    for entry in table(SamplingParams).values():
        if entry.type is float and (numbers := entry.parameter.range) is not None:
            low, high = numbers.low, numbers.high
            limits = (*_LIMITS_OF_FLOATS, low, high)
            fields[f"SamplingParams.{entry.name}"] = field(0.15, _floats(low, min(high, 2.0)), *limits)
    return fields


FIELDS: Mapping[str, Field] = _fields_of_floats() | {
    "Generation.model": field(0.1, lambda _: "demo", *_STRINGS, "other"),
    "Generation.text": Field(1.0, _text, lambda random: random.choice(["", "x" * 100_000, "é🙂" * 3000])),
    "Generation.token_ids": field(1.0, lambda random: pb.TokenIds(ids=_ids(1, 200)(random)))._replace(
        odd=lambda random: pb.TokenIds(ids=random.choice(_LIMITS_OF_TOKENS))
    ),
    "Generation.chat": Field(1.0, _chat, _odd_chat),
    "Generation.request_id": field(0.1, lambda random: f"fuzz-{random.randrange(10)}", *_STRINGS),
    "Generation.cache_salt": field(0.2, lambda random: f"salt {random.randrange(3)}", *_STRINGS),
    "Generation.session": field(0.2, lambda random: f"session {random.randrange(3)}", *_STRINGS),
    "Generation.priority": field(0.2, _integers(-100, 100), *_LIMITS_OF_SIGNED),
    "Generation.received": Field(0.03, _received, _odd_received),
    "Generation.origin": field(0.03, lambda _: "another model", *_STRINGS),
    "ResponseFormat.json_schema": Field(1.0, random_schema, random_schema),
    "ResponseFormat.regex": Field(1.0, random_regex, random_regex),
    "ResponseFormat.grammar": Field(1.0, random_grammar, random_grammar),
    "SamplingParams.temperature": field(
        0.7, lambda random: random.choice([0.0, 0.7, 1.0]), *_LIMITS_OF_FLOATS
    ),
    "SamplingParams.top_k": field(0.3, _integers(0, 50), *_LIMITS_OF_INTEGERS),
    "SamplingParams.seed": field(0.8, _integers(0, 2**64 - 1), 0, 2**64 - 1),
    "SamplingParams.n": field(0.2, _integers(1, 4), *_LIMITS_OF_INTEGERS, 64),
    "SamplingParams.logit_bias": field(
        0.15, _bias, {VOCAB_SIZE: 1.0}, {0: INFINITE}, {0: 101.0}, {0: -100.0, 1: 100.0}
    ),
    "SamplingParams.allowed_token_ids": field(0.08, _ids(1, 40), *_LIMITS_OF_TOKENS),
    "SamplingParams.bad_words": field(
        0.1, lambda random: random.choices(WORDS, k=2), [""], ["x" * 5000], ["a"] * 3000
    ),
    "SamplingParams.bad_word_token_ids": field(
        0.1,
        lambda random: [pb.TokenIds(ids=_ids(1, 3)(random))],
        [pb.TokenIds()],
        [pb.TokenIds(ids=[VOCAB_SIZE])],
    ),
    "SamplingParams.best_of": field(0.08, _integers(1, 6), *_LIMITS_OF_INTEGERS),
    "SamplingParams.kv_budget_tokens": field(0.04, _integers(48, 200), *_LIMITS_OF_INTEGERS),
    "BeamParams.width": field(1.0, _integers(2, 6), *_LIMITS_OF_INTEGERS),
    "BeamParams.length_penalty": field(0.5, _floats(-2, 2), *_LIMITS_OF_FLOATS),
    "BeamParams.early_stopping": field(0.5, _integers(0, 3), 4, 99),
    "StoppingParams.max_tokens": field(0.95, _integers(1, 40), *_LIMITS_OF_SIGNED),
    "StoppingParams.min_tokens": field(0.15, _integers(0, 10), *_LIMITS_OF_SIGNED),
    "StoppingParams.stop_strings": field(
        0.2, lambda random: random.choices(WORDS, k=2), [""], ["x" * 5000], ["a"] * 100
    ),
    "StoppingParams.stop_token_ids": field(0.2, _ids(1, 5), *_LIMITS_OF_TOKENS),
    "StoppingParams.ignore_eos": field(0.3, _true),
    "ResponseOptions.logprobs": field(0.2, _integers(0, 5), *_LIMITS_OF_INTEGERS, 20),
    "ResponseOptions.keep_special_tokens": field(0.2, _true),
    "ResponseOptions.keep_stop_string": field(0.2, _true),
    "ResponseOptions.prompt_logprobs": field(0.1, _integers(0, 5), *_LIMITS_OF_INTEGERS, 20),
    "ResponseOptions.prompt_token_ids": field(0.1, _true),
    "ResponseOptions.parse": field(0.2, _true),
}
PARTS: Mapping[str, float] = {
    "Generation.sampling": 0.9,
    "Generation.stopping": 0.97,
    "Generation.response": 0.5,
    "Generation.format": 0.25,
    "SamplingParams.beam": 0.06,
}
"""Messages within the request, and the share of requests that have them."""
_EXCLUSIVE = {"prompt", "format"}
"""Names of oneofs; exactly one member is set."""


def random_generation(random: Random) -> pb.Generation:
    """Return a request with a random set of fields."""
    generation = pb.Generation()
    _fill(generation, random)
    return generation


def _fill(message: Any, random: Random) -> None:
    chosen = {
        oneof.name: random.choice(oneof.fields).name
        for oneof in message.DESCRIPTOR.oneofs
        if oneof.name in _EXCLUSIVE
    }
    for descriptor in message.DESCRIPTOR.fields:
        oneof = descriptor.containing_oneof
        if oneof is not None and oneof.name in chosen and chosen[oneof.name] != descriptor.name:
            continue
        name = f"{message.DESCRIPTOR.name}.{descriptor.name}"
        if name in PARTS:
            if random.random() < PARTS[name]:
                getattr(message, descriptor.name).SetInParent()
                _fill(getattr(message, descriptor.name), random)
            continue
        share, usual, odd = FIELDS[name]
        if random.random() < share:
            _set(message, descriptor, (odd if random.random() < ODD_SHARE else usual)(random))


def _set(message: Any, descriptor: FieldDescriptor, value: Any) -> None:
    if isinstance(value, dict):
        getattr(message, descriptor.name).update(value)
    elif isinstance(value, list):
        getattr(message, descriptor.name).extend(value)
    elif descriptor.message_type is not None:
        getattr(message, descriptor.name).CopyFrom(value)
    else:
        setattr(message, descriptor.name, value)
