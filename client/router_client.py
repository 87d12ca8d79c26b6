"""What the blocking and the asyncio client have in common: their channels, and what each call carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.client.channel import channel_options, several_options
from quire.client.routers import Attempts, Routers
from quire.client.tls import Tls, bearer
from quire.protos.inference_pb2_grpc import GenerationServiceStub

LONGEST_SECONDS = 1e9
"""Longest seconds of a call: gRPC takes much longer ones, as infinity, for times in the past."""
Method = Callable[[GenerationServiceStub], Any]
"""Function that returns a method of a stub."""


class RouterClient:
    """Opens a channel to each router, with the functions of a module of gRPC."""

    _grpc: Any

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:8500",
        *,
        timeout: float = 300.0,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._timeout = timeout
        self._metadata = bearer(api_key)
        self._channels: list[Any] = []
        self._is_closed = False
        options = [*channel_options(), *several_options(address)]

        def connect(one: str) -> GenerationServiceStub:
            if tls is None:
                channel = self._grpc.insecure_channel(one, options=options)
            else:
                credentials = tls.credentials()
                channel = self._grpc.secure_channel(one, credentials, options=[*options, *tls.options()])
            self._channels.append(channel)
            return GenerationServiceStub(channel)

        self._connect = connect
        self._routers = Routers(address, connect)

    def _begin(self, method: Method, attempts: Attempts[GenerationServiceStub], request: Any) -> Any:
        """Begin a call to the router of the present attempt."""
        call = method(attempts.router.stub)
        return call(request, timeout=attempts.seconds_left, metadata=self._metadata)

    def _deadline(self, timeout: float | None) -> float:
        return min(LONGEST_SECONDS, self._timeout if timeout is None else timeout)
