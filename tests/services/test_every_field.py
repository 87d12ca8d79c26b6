"""No field of a request is dropped in silence: each has an effect, or is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, NotFound
from quire.sampling import messages
from quire.sampling.messages import format_from_proto, to_proto
from quire.sampling.params import BeamParams, ResponseOptions, SamplingParams
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import validate
from quire.services.router.tenants.session_name import session_name
from quire.services.worker.requests.convert import sequence_from_proto

# Messages whose fields are all parameters; the fields of other messages count as one value.
PARTS = ("SamplingParams", "BeamParams", "StoppingParams", "ResponseOptions", "ResponseFormat")
PROMPTS = {"text": "hello", "token_ids": pb.TokenIds(ids=[9]), "chat": pb.Chat()}
VALUES = {**PROMPTS, "kv_budget_tokens": 16, "received": [pb.ReceivedAnswer(token_ids=[5])]}
"""Values of fields for which the value of their type would not do."""
Path = tuple[str, ...]


def leaves(message: Any, path: Path = ()) -> Iterator[tuple[Path, FieldDescriptor]]:
    """Yield the paths and descriptors of a message's fields, and of those of the messages in it."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.name in PARTS:
            yield from leaves(getattr(message, field.name), (*path, field.name))
        else:
            yield (*path, field.name), field


LEAVES = {".".join(path): field for path, field in leaves(pb.Generation())}


def value_of(field: FieldDescriptor) -> Any:
    """Return a value that differs from the field's default and is in the range of all fields of its type."""
    if field.name in VALUES:
        return VALUES[field.name]
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.message_type is not None:
        is_map = field.message_type.GetOptions().map_entry
        return {5: 0.5} if is_map else [pb.TokenIds(ids=[5])] if field.is_repeated else pb.TokenIds(ids=[5])
    kinds = {field.TYPE_STRING: "x", field.TYPE_BOOL: True, field.TYPE_FLOAT: 0.5, field.TYPE_DOUBLE: 0.5}
    value = kinds.get(field.type, 3)
    return [value] if field.is_repeated else value


def request(path: str, *, is_set: bool) -> pb.Generation:
    """Return a request with or without one field, whose other fields let it have an effect."""
    generation = pb.Generation(token_ids=pb.TokenIds(ids=[5, 6, 7]), request_id="r")
    generation.sampling.seed = 1
    *groups, name = path.split(".")
    owner: Any = generation
    for group in groups:
        owner = getattr(owner, group)
    if isinstance(owner, pb.BeamParams):
        owner.width = 2
    if is_set:
        value = value_of(LEAVES[path])
        if isinstance(value, dict):
            getattr(owner, name).update(value)
        elif isinstance(value, list):
            getattr(owner, name).extend(value)
        elif isinstance(value, pb.TokenIds | pb.Chat):
            getattr(owner, name).CopyFrom(value)
        else:
            setattr(owner, name, value)
    return generation


async def outcome(generation: pb.Generation, model: ServedModel) -> tuple[Any, ...]:
    """Return what the engine and the router get of a request."""
    valid = await validate(generation, model)
    message = to_proto(valid.params, valid.format)
    message.token_ids.extend(valid.prompt_token_ids)
    sequence = sequence_from_proto(message, b"", model.vocab_size, stops_after_prefill=False)
    engine = (sequence.params, sequence.token_ids, format_from_proto(message.format))
    assert (sequence.params, format_from_proto(message.format)) == (valid.params, valid.format)
    router = (
        valid.response,
        valid.num_best,
        valid.request_id,
        valid.cache_salt,
        valid.priority,
        valid.division is None,
    )
    return *engine, *router, session_name((), generation.session)


async def is_dropped(path: str, model: ServedModel) -> bool:
    """Return whether a request is served as if it did not have a field."""
    try:
        changed = await outcome(request(path, is_set=True), model)
    except (InvalidArgument, NotFound) as error:
        return not error.metadata["field"].startswith(path)
    return changed == await outcome(request(path, is_set=False), model)


@pytest.mark.parametrize("path", LEAVES)
async def test_a_field_has_an_effect_or_is_refused(model: ServedModel, path: str) -> None:
    assert not await is_dropped(path, model)


def test_the_fields_are_all_there() -> None:
    assert {"sampling.typical_p", "sampling.beam.width", "stopping.stop_strings", "cache_salt"} < {*LEAVES}
    assert len(LEAVES) >= 38


@pytest.mark.parametrize(
    ("kind", "group", "field"),
    [
        (SamplingParams, "sampling", "min_p"),
        (SamplingParams, "stopping", "ignore_eos"),
        (BeamParams, "sampling.beam", "length_penalty"),
        (ResponseOptions, "response", "prompt_token_ids"),
    ],
)
async def test_a_forgotten_field_is_found(
    monkeypatch: pytest.MonkeyPatch, model: ServedModel, kind: type, group: str, field: str
) -> None:
    monkeypatch.delitem(messages._fields(kind)[group], field)
    assert await is_dropped(f"{group}.{field}", model)
