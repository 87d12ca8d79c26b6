"""A push reveals the keys of its pool only to a process that has proved the cluster secret."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.kvtransfer.transports.messages import MessagesOnly
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool
from quire.rpc.proof import ANSWER_KEY, CHALLENGE_KEY, Caller, answer_proof
from tests.testing.transport_pair import LAYOUT, RECEIVER_EPOCH, WAIT_SECONDS

SECRET = b"secret"
KEYS = b"keys"


class Listener(kvtransfer_pb2_grpc.KvTransferServiceServicer):
    """Answers the challenge by a proof of its secret, and keeps all that it is sent."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.address = ""
        self.opened: list[pb.PushOpen] = []
        self.ended = asyncio.Event()

    async def Push(self, requests: AsyncIterator[pb.PushRequest], context: Any) -> AsyncIterator[Any]:
        challenge = dict(context.invocation_metadata())[CHALLENGE_KEY]
        answer = answer_proof(self._secret, challenge, RECEIVER_EPOCH, self.address)
        try:
            # The sender may end the call as soon as it has the answer.
            await context.send_initial_metadata(((ANSWER_KEY, answer),))
            async for request in requests:
                self.opened.append(request.open)
                yield pb.PushResponse(refused=pb.PushRefused(status_code=9, message="seen"))
                return
        finally:
            self.ended.set()


@pytest.mark.parametrize(("secret", "reason"), [(SECRET, "seen"), (b"another", "did not prove")])
async def test_keys_go_only_to_a_process_with_the_secret(secret: bytes, reason: str) -> None:
    server, listener = grpc.aio.server(), Listener(secret)
    listener.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(listener, server)
    await server.start()
    channels = ChannelPool(caller=Caller(SECRET))
    transports = MessagesOnly()
    transports.offer = pb.SharedPool(epoch="sender", keys=KEYS)
    ticket = pb.Ticket(ticket_id="t", address=listener.address, receiver_epoch=RECEIVER_EPOCH)
    push = BlockPush(
        channels,
        ticket,
        attempt=1,
        blocks=PromptBlocks(LAYOUT, 1),
        timeout=WAIT_SECONDS,
        transports=transports,
    )
    try:
        with pytest.raises(PushFailedError, match=reason):
            async with push:
                await push.commit(1)
        await asyncio.wait_for(listener.ended.wait(), WAIT_SECONDS)
        got = [each.shared_pool.keys for each in listener.opened]
        assert got == ([KEYS] if secret == SECRET else [])
    finally:
        await channels.close()
        await server.stop(None)
