"""``quire health``: asks a process whether it can serve requests, and why not."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli import options
from quire.cli.failure import connection_problem, fail
from quire.cli.spread import spread

NO_PROXY = ("grpc.enable_http_proxy", 0)
"""The option of a channel that does not go through a proxy of the environment."""
LONGEST_SECONDS = 1e9
"""Longest deadline of a call; gRPC takes a much longer one for one that has passed."""


@spread
def health(
    *,
    address: Annotated[
        str, typer.Argument(help="host:port of a router or a worker.", metavar="ADDRESS")
    ] = options.DEFAULT_ADDRESS,
    option: Annotated[str | None, typer.Option("--address", help="The same as ADDRESS.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="How long to wait for the answer, in seconds.", min=0.001)
    ] = 3.0,
    encryption: options.ClientTls,
) -> None:
    """Ask a router or a worker whether it can serve requests, and why not; the exit status is 0 if it can.

    With TLS between router and workers, a worker asks for a certificate of the cluster, and the name in its
    own certificate is quire-cluster.
    """
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    address = option or address
    tls = encryption.files()
    if tls is None:
        opened = grpc.insecure_channel(address, options=[NO_PROXY])
    else:
        opened = grpc.secure_channel(address, tls.credentials(), options=[NO_PROXY, *tls.options()])
    with opened as channel:
        try:
            answer, call = HealthStub(channel).Check.with_call(
                HealthCheckRequest(), timeout=min(LONGEST_SECONDS, timeout)
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                fail(f"{address} speaks gRPC but does not report its health: is it a server of quire?")
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                fail(f"{address} has not answered within {timeout:g} s: it is stopped, stuck or unreachable")
            problem = connection_problem(error.details() or "", address)
            fail(problem or f"{address} does not answer: {error.code().name}")
    told = dict(call.trailing_metadata())
    if answer.status != HealthCheckResponse.SERVING:
        status = told.get("quire-status", "not_ready").replace("_", " ")
        fail(f"{address} is {status}: {told.get('quire-reason', 'it gives no reason')}")
    typer.echo("ready")
