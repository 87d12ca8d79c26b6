"""Converts the parameters of a request to messages and back, by the table of their fields."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.message import Message

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.sampling.output_format import OutputFormat
from quire.sampling.parameter import Entry, Parameter, ParameterError, table
from quire.sampling.params import BeamParams, EarlyStopping, SamplingParams

EARLY_STOPPING: Mapping[EarlyStopping, pb.EarlyStopping] = {
    False: pb.EARLY_STOPPING_UNLIKELY,
    "never": pb.EARLY_STOPPING_IMPOSSIBLE,
    True: pb.EARLY_STOPPING_ENOUGH,
}


class _Codec(NamedTuple):
    """Turns a field's value into a parameter's, and back."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any]


class _Field(NamedTuple):
    """A field of a message, and the parameter that it holds."""

    name: str
    parameter: Parameter
    codec: _Codec


def from_proto(message: worker_pb2.Sequence) -> SamplingParams:
    """Return the parameters of a worker's sequence.

    Raises:
        ParameterError: a value is outside its range, or values contradict each other.
    """
    return SamplingParams(**values_from_proto(SamplingParams, message))


def values_from_proto(kind: type, message: pb.Generation | worker_pb2.Sequence) -> dict[str, Any]:
    """Return the parameters of one dataclass that a message sets, by their names; ranges are not checked.

    Raises:
        ParameterError: a collection has too many items, or an enumeration does not have a value.
    """
    values: dict[str, Any] = {}
    for group, fields in _fields(kind).items():
        # A worker's sequence has the options of the response that it needs as separate fields.
        is_flat = group == "response" and isinstance(message, worker_pb2.Sequence)
        values |= _read(message if is_flat else getattr(message, group), fields)
    return values


def to_proto(params: SamplingParams, output_format: OutputFormat | None) -> worker_pb2.Sequence:
    """Return a sequence with these parameters, all of them, and without tokens."""
    groups = {group: _write(params, fields) for group, fields in _fields(SamplingParams).items()}
    return worker_pb2.Sequence(
        sampling=pb.SamplingParams(**groups["sampling"]),
        stopping=pb.StoppingParams(**groups["stopping"]),
        format=None if output_format is None else format_to_proto(output_format),
        **groups["response"],
    )


def format_from_proto(message: pb.ResponseFormat) -> OutputFormat | None:
    """Return a format; None if the message has none."""
    kind = message.WhichOneof("format")
    return None if kind is None else OutputFormat(kind, getattr(message, kind))


def format_to_proto(output_format: OutputFormat) -> pb.ResponseFormat:
    """Return the message of a format."""
    return pb.ResponseFormat(**{output_format.kind: output_format.text})


@cache
def _fields(kind: type) -> dict[str, dict[str, _Field]]:
    """Return the fields that hold a dataclass's parameters, by the path of their message and their name."""
    groups: defaultdict[str, dict[str, _Field]] = defaultdict(dict)
    for entry in table(kind).values():
        group, _, field = entry.parameter.path.rpartition(".")
        groups[group][field] = _Field(entry.name, entry.parameter, _codec(entry))
    return dict(groups)


def _read(message: Message, fields: Mapping[str, _Field]) -> dict[str, Any]:
    values = {}
    for descriptor, sent in message.ListFields():
        field = fields.get(descriptor.name)
        if field is not None:
            name, parameter, codec = field
            if parameter.max_items is not None:
                # The size is that of the message's list, which may name a token twice.
                parameter.check_size(sent)
            values[name] = codec.read(sent)
    return values


def _write(params: object, fields: Mapping[str, _Field]) -> dict[str, Any]:
    return {
        name: field.codec.write(value)
        for name, field in fields.items()
        if (value := getattr(params, field.name)) is not None
    }


def _codec(entry: Entry) -> _Codec:
    if entry.name in _CODECS:
        return _CODECS[entry.name]
    if isinstance(entry.default, frozenset):
        return _Codec(frozenset, sorted)
    if isinstance(entry.default, tuple):
        return _Codec(tuple, list)
    return _Codec(_unchanged, _unchanged)


def _unchanged(value: Any) -> Any:
    return value


def _read_early_stopping(number: int) -> EarlyStopping:
    names: dict[int, EarlyStopping]
    names = {pb.EARLY_STOPPING_UNSPECIFIED: False, **{each: name for name, each in EARLY_STOPPING.items()}}
    if number not in names:
        problem = f"must be one of {', '.join(pb.EarlyStopping.keys())}; got {number}"
        raise ParameterError("sampling.beam.early_stopping", problem)
    return names[number]


def _read_beam(message: pb.BeamParams) -> BeamParams:
    values = _read(message, _fields(BeamParams)["sampling.beam"])
    return BeamParams(**{"width": message.width, **values})


def _write_beam(params: BeamParams) -> pb.BeamParams:
    return pb.BeamParams(**_write(params, _fields(BeamParams)["sampling.beam"]))


def _read_words(messages: list[pb.TokenIds]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(message.ids) for message in messages)


def _write_words(words: tuple[tuple[int, ...], ...]) -> list[pb.TokenIds]:
    return [pb.TokenIds(ids=word) for word in words]


_CODECS: Mapping[str, _Codec] = {
    "beam": _Codec(_read_beam, _write_beam),
    "early_stopping": _Codec(_read_early_stopping, EARLY_STOPPING.__getitem__),
    "logit_bias": _Codec(lambda biases: tuple(biases.items()), dict),
    "bad_words": _Codec(_read_words, _write_words),
}
"""Codecs of the parameters that have another form in messages."""
