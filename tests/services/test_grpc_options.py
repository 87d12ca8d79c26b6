"""gRPC ignores options that it does not know: are their names in its library, and do they have an effect?"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool
from quire.rpc.server import Service, grpc_server

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "cli", "client", "examples", "kvtransfer", "llm", "observability", "rpc", "services")
SILENT_SECONDS = 6.0
"""Time for five hastened pings."""
LAYOUT = KvLayout(2, 2, 4, 8, "float16", "model-a", "float16", "float32-1")


def option_names() -> set[str]:
    """Return the names of options in the sources; docstrings are no options."""
    found = set()
    for folder in FOLDERS:
        for path in ROOT.joinpath(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Constant(str(text)) if text.startswith("grpc."):
                        found.add(text)
    return found


def test_grpc_knows_every_option() -> None:
    library = import_module("grpc._cython.cygrpc").__file__
    assert library is not None
    content = Path(library).read_bytes()
    names = option_names()
    assert {"grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms"} <= names
    assert [name for name in sorted(names) if name.encode() + b"\0" not in content] == []


def test_no_channel_has_the_default_options() -> None:
    """By default, a channel uses the proxy that the environment names, even for the loopback."""
    bare = []
    for folder in FOLDERS:
        for path in ROOT.joinpath(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(ast.Attribute(attr="insecure_channel" | "secure_channel"), keywords=given):
                        if "options" not in {each.arg for each in given}:
                            bare.append(f"{path}:{node.lineno}")
    assert bare == []


class LateReceiver(kvtransfer_pb2_grpc.KvTransferServiceServicer):
    """Grants no credit for a while, and then all of it."""

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: Any
    ) -> AsyncIterator[pb.PushResponse]:
        opening = await anext(request_iterator)
        await asyncio.sleep(SILENT_SECONDS)
        yield pb.PushResponse(
            credit=pb.PushCredit(num_blocks=opening.open.num_blocks, transport=pb.TRANSPORT_MESSAGES)
        )
        async for request in request_iterator:
            if request.WhichOneof("message") == "commit":
                yield pb.PushResponse(committed=pb.PushCommitted())
                return


@pytest.mark.slow
async def test_a_push_can_wait_for_credit_longer_than_three_pings(hastened_pings: None) -> None:
    service = Service(
        kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
        LateReceiver(),
        "quire.v1.KvTransferService",
    )
    async with grpc_server([service], registry=CollectorRegistry(), grace_seconds=0) as server:
        pool = ChannelPool()
        push = BlockPush(
            pool,
            pb.Ticket(ticket_id="t", address=server.address),
            attempt=0,
            blocks=PromptBlocks(LAYOUT, 1),
            timeout=30.0,
        )
        async with push:
            await push.send([Frame(0, b"hash", bytes(LAYOUT.block_bytes))])
            assert (await push.commit(5)).num_blocks == 1
        await pool.close()
