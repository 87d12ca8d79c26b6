"""The fuzz draws every field of a request, and its checks find what is wrong."""

from __future__ import annotations

from random import Random
from typing import Any

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.requests import ChatCompletionRequest, CompletionRequest
from tests.soak.fuzz.answers import answer_problem
from tests.soak.fuzz.http_bodies import BOTH, CHATS, COMPLETIONS, HTTP_NAMES, http_call
from tests.soak.fuzz.requests import FIELDS, PARTS, random_generation

_WITHOUT_EFFECT = {
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "spaces_between_special_tokens",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "modalities",
    "verbosity",
}


def names(kind: Any) -> set[str]:
    """Return the fields of a message and of the messages in it, unless the fuzz draws them whole."""
    found = set()
    for field in kind.fields:
        name = f"{kind.name}.{field.name}"
        found.add(name)
        if name not in FIELDS and field.message_type is not None:
            found |= names(field.message_type)
    return found


def test_every_field_of_the_proto_is_drawn() -> None:
    assert names(pb.Generation.DESCRIPTOR) == {*FIELDS, *PARTS}


def test_every_member_of_an_http_body_is_drawn() -> None:
    both = {*HTTP_NAMES.values(), *BOTH, "stream", "use_beam_search", "length_penalty"}
    both |= {"structured_outputs", "response_format", *_WITHOUT_EFFECT}
    assert set(CompletionRequest.model_fields) <= both | {*COMPLETIONS, "prompt"}
    assert set(ChatCompletionRequest.model_fields) <= both | {*CHATS, "messages"}


def test_a_seed_names_a_request() -> None:
    first, second = (random_generation(Random("1-7")) for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)
    assert http_call(first, Random(1)) == http_call(second, Random(1))


def test_wrong_answers_are_found() -> None:
    generation = pb.Generation()
    generation.sampling.allowed_token_ids.extend([1, 2])
    generation.stopping.max_tokens = 2
    generation.format.regex = "a+"
    choice = pb.Choice(text="aa", token_ids=[1, 2], finish_reason=pb.FINISH_REASON_STOP)
    usage = pb.Usage(completion_tokens=2)

    def problem(**changes: Any) -> str | None:
        changed = pb.Choice()
        changed.CopyFrom(choice)
        for name, value in changes.items():
            changed.ClearField(name)
            changed.MergeFrom(pb.Choice(**{name: value}))
        return answer_problem(generation, pb.GenerateResponse(choices=[changed], usage=usage))

    assert problem() is None
    assert problem(text="ab") == "no match of 'a+': 'ab'"
    assert problem(token_ids=[1, 3]) == "a token that is not allowed"
    assert problem(finish_reason=0) == "the finish reason is 0"
    assert answer_problem(generation, pb.GenerateResponse(usage=usage)) == "0 answers instead of 1"
