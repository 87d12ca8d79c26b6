"""Defines time limits for HTTP clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """Time limits for a client, in seconds.

    Attributes:
        head_seconds: time from the start of a connection, or from the last response, until the headers of the
            next request have arrived.
        body_seconds: time from the headers of a request until its body has arrived.
        piece_seconds: time within which each further KiB of a body must arrive.
        read_seconds: time within which a client has to read some of the bytes that wait for it.
    """

    head_seconds: float = 20.0
    body_seconds: float = 30.0
    piece_seconds: float = 10.0
    read_seconds: float = 30.0
