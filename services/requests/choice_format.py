"""Builds the format of an answer that must be one of several texts."""

from __future__ import annotations

import json
from collections.abc import Iterable

from quire.protos import inference_pb2 as pb


def choice_format(choices: Iterable[str]) -> pb.ResponseFormat:
    """Return a grammar that accepts exactly these texts.

    The texts form one terminal, which the lexer follows in a single state. As alternatives of a rule, each
    text would be an item of the parser, and the number of items is limited.
    """
    # Strings in a Lark grammar have the same escapes as strings in JSON.
    return pb.ResponseFormat(grammar="start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
