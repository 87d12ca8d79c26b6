"""A random request as the body of an HTTP call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.sampling_fields import GenerationFields
from tests.soak.fuzz.requests import ODD_SHARE, Field, field

_MESSAGES = (pb.Generation, pb.SamplingParams, pb.StoppingParams, pb.ResponseOptions)
HTTP_NAMES: Mapping[str, str] = {
    f"{message.DESCRIPTOR.name}.{field.name}": field.name
    for message in _MESSAGES
    for field in message.DESCRIPTOR.fields
    if field.name in GenerationFields.model_fields
} | {
    "StoppingParams.stop_strings": "stop",
    "ResponseOptions.prompt_token_ids": "return_token_ids",
    "ResponseOptions.keep_stop_string": "include_stop_str_in_output",
}
"""Fields of ``quire.v1`` that an HTTP body also has, and their names there."""

_CHOICES = [["yes", "no"], ["a", "ab", "abc"], [""], ["x"] * 3000]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
BOTH: Mapping[str, Field] = {
    "stream_options": field(0.1, lambda _: {"include_usage": True}, {}, [], {"other": 1}),
    "skip_special_tokens": field(0.1, lambda _: False, "no"),
    "return_tokens_as_token_ids": field(0.05, lambda _: True, 1),
    "user": field(0.05, lambda _: "somebody", {"a": [1]}),
    "unknown_member": field(0.0, lambda _: None),
}
COMPLETIONS: Mapping[str, Field] = {
    "echo": field(0.1, lambda _: True, "yes"),
    "suffix": field(0.02, lambda _: "", "x"),
    "logprobs": field(0.15, lambda random: random.randint(0, 5), -1, 21, True),
    "best_of": field(0.05, lambda random: random.randint(1, 4), 0, 65),
}
CHATS: Mapping[str, Field] = {
    "logprobs": field(0.15, lambda _: True, 3),
    "top_logprobs": field(0.1, lambda random: random.randint(0, 5), -1, 21),
    "tools": field(0.1, lambda _: [_TOOL], [_TOOL] * 129, [{}], "x"),
    "tool_choice": field(0.1, lambda random: random.choice(["auto", "none", "required"]), "always", {}),
    "parallel_tool_calls": field(0.05, lambda _: False),
    "max_completion_tokens": field(0.05, lambda random: random.randint(1, 20), 0, -1, 2**31),
    "reasoning_effort": field(0.03, lambda _: "low", 1),
    "chat_template_kwargs": field(0.05, lambda _: {"a": 1}, [], {"messages": "x"}),
}


def http_call(generation: pb.Generation, random: Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a call that asks for a generation, with members of HTTP's own."""
    body: dict[str, Any] = {"stream": random.random() < 0.5}
    for part in (generation, generation.sampling, generation.stopping, generation.response):
        for descriptor, value in part.ListFields():
            name = HTTP_NAMES.get(f"{part.DESCRIPTOR.name}.{descriptor.name}")
            if name is not None:
                body[name] = _plain(value)
    if generation.sampling.HasField("beam"):
        body |= {"use_beam_search": True, "n": generation.sampling.beam.width}
        body["length_penalty"] = generation.sampling.beam.length_penalty
    if generation.HasField("format"):
        body |= _format(generation.format, random)
    match generation.WhichOneof("prompt"):
        case "chat":
            path, own = "/v1/chat/completions", CHATS
            body["messages"] = [
                {"role": message.role, "content": message.content} for message in generation.chat.messages
            ]
        case "token_ids":
            path, own = "/v1/completions", COMPLETIONS
            body["prompt"] = list(generation.token_ids.ids)
        case _:
            path, own = "/v1/completions", COMPLETIONS
            body["prompt"] = generation.text
            if random.random() < 0.1:
                body["prompt"] = [generation.text] * random.choice([1, 2, 3, 257])
    for name, (share, usual, odd) in {**BOTH, **own}.items():
        if random.random() < share:
            body[name] = (odd if random.random() < ODD_SHARE else usual)(random)
    return path, body


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    return value if isinstance(value, str | int | float | bool) else list(value)


def _format(wanted: pb.ResponseFormat, random: Random) -> dict[str, Any]:
    kind = wanted.WhichOneof("format")
    if kind == "json_schema":
        try:
            schema = json.loads(wanted.json_schema)
        except (ValueError, RecursionError):
            return {"structured_outputs": {"json": wanted.json_schema}}
        if random.random() < 0.5:
            return {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            }
        return {"structured_outputs": {"json": schema}}
    if random.random() < 0.1:
        return {"structured_outputs": {"choice": random.choice(_CHOICES)}}
    return {"structured_outputs": {kind: getattr(wanted, kind)}}
