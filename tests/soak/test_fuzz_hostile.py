"""The fuzz's hostile connections send what they are named after."""

from __future__ import annotations

import struct
from itertools import islice

import h2.config
import h2.connection
import h2.events
import pytest

from tests.soak.fuzz.hostile import _HEADERS, HEADERS, frame, grpc_floods, http_floods


@pytest.mark.parametrize("name", grpc_floods())
def test_a_flood_of_the_grpc_port_consists_of_whole_frames(name: str) -> None:
    opening, *repeated = islice(grpc_floods()[name], 3)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert opening.startswith(preface)
    for sent in (opening.removeprefix(preface), *repeated):
        at = 0
        while at < len(sent):
            at += 9 + struct.unpack(">I", b"\0" + sent[at : at + 3])[0]
        assert at == len(sent)


def test_the_headers_of_a_flood_are_a_call() -> None:
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
    server.initiate_connection()
    opening = next(grpc_floods()["resets"])
    events = server.receive_data(opening + frame(HEADERS, 5, 1, _HEADERS))
    [request] = [event for event in events if isinstance(event, h2.events.RequestReceived)]
    headers = dict(request.headers)
    assert headers[b":path"] == b"/quire.v1.GenerationService/GenerateStream"
    assert headers[b"content-type"] == b"application/grpc"


def test_the_http_port_is_flooded_too() -> None:
    assert {name: len(list(islice(sent, 3))) for name, sent in http_floods().items()} == dict.fromkeys(
        ("chunks", "unknown path", "pipelined"), 3
    )
