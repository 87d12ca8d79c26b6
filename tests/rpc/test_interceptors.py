"""What interceptors share: which calls they change, and a refusal before the request is read."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
import pytest

from quire.rpc.errors import Unauthenticated
from quire.rpc.interceptors import OwnCalls, handler_kind, refusal


class Details(NamedTuple):
    """A call's method."""

    method: str


class Mark(OwnCalls):
    """Returns the method instead of its handler."""

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        return details.method


@pytest.mark.parametrize(
    ("method", "handler", "expected"),
    [
        ("/quire.v1.WorkerService/Decode", "handler", "/quire.v1.WorkerService/Decode"),
        ("/quire.v1.WorkerService/Unknown", None, None),
        ("/grpc.health.v1.Health/Check", "handler", "handler"),
        ("/grpc.reflection.v1.ServerReflection/X", "handler", "handler"),
        ("/grpcx/X", "handler", "/grpcx/X"),
    ],
)
async def test_grpcs_own_services_are_unchanged(
    method: str, handler: str | None, expected: str | None
) -> None:
    async def continuation(details: Any) -> Any:
        return handler

    details: Any = Details(method)
    assert await Mark().intercept_service(continuation, details) == expected


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
def test_the_kind_of_a_handler_names_its_function(kind: str) -> None:
    def function(request: Any, context: Any) -> None: ...

    handler = getattr(grpc, f"{kind}_rpc_method_handler")(function)
    assert handler_kind(handler) == kind
    assert getattr(handler, handler_kind(handler)) is function


async def test_a_refusal_reads_nothing() -> None:
    error = Unauthenticated("no key")

    async def requests() -> Any:
        pytest.fail("the request was read")
        yield

    handler = refusal(error)
    with pytest.raises(Unauthenticated) as refused:
        await getattr(handler, handler_kind(handler))(requests(), None)
    assert refused.value is error
