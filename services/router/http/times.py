"""How long an HTTP client may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpTimes:
    """Limits in seconds.

    Attributes:
        head_seconds: from a connection's begin, or from an answer, until the next request's headers are here.
        body_seconds: from a request's headers until its body is here.
        read_seconds: in which a client for whom bytes wait has to read some.
    """

    head_seconds: float = 20.0
    body_seconds: float = 30.0
    read_seconds: float = 30.0
