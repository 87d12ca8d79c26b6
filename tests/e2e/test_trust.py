"""Strangers: Redis' password makes no worker, and a worker's port serves its cluster only."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.client import AsyncClient
from quire.kvindex.redis_index import RedisIndex, WorkerLease, publisher_client
from quire.kvindex.worker_record import WorkerRecord
from quire.protos import inference_pb2, worker_pb2
from quire.protos import kvtransfer_pb2 as kv
from quire.protos.kvtransfer_pb2_grpc import KvPullServiceStub, KvTransferServiceStub
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from tests.testing.intruder import Intruder, serving
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle

SECRET = "the secret of this cluster"
WAIT_SECONDS = 20.0
NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def cluster(start_stack: StartStack, redis: RedisProcess) -> Iterator[RunningStack]:
    """Run one prefill and one decode worker, with a Redis that the tests can write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_SECRET", SECRET)
        with start_stack("llama", redis_url=redis.url) as running:
            yield running


async def test_redis_password_makes_no_worker(
    cluster: RunningStack, redis: RedisProcess, expected: Any
) -> None:
    client = publisher_client(redis.worker_url)
    lease = WorkerLease(client, WAIT_SECONDS)
    (record,) = [each for each in await RedisIndex(client).members() if each.role == "decode"]
    intruder = Intruder(record.address, num_blocks=10**6)
    async with serving(intruder) as server, AsyncClient(cluster.address) as asker:
        await server.ready()
        await lease.join(WorkerRecord("intruder", "decode", server.address, record.epoch, record.fingerprint))
        # The router has asked it twice: what it said the first time did not make it a worker.
        for _ in range(2):
            intruder.challenged.clear()
            await asyncio.wait_for(intruder.challenged.wait(), WAIT_SECONDS)
        for seed in range(NUM_PROMPTS):
            prompt = make_prompt(40, seed=seed)
            answer = await asker.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
            assert list(answer.token_ids) == expected("llama", prompt)[:4]
        assert intruder.prompts == []
        await lease.leave()
    await client.aclose()


async def nothing_sent() -> AsyncIterator[kv.PushRequest]:
    """Send no message: gRPC's client loses the status of a call that ends while it still writes."""
    await asyncio.Event().wait()
    yield kv.PushRequest()


def strangers_calls(channel: grpc.aio.Channel, info: worker_pb2.GetWorkerInfoResponse) -> dict[str, Any]:
    """Return the calls that a stranger may try who reaches a worker's port and knows all that it tells."""
    worker, push, pull = (
        WorkerServiceStub(channel),
        KvTransferServiceStub(channel),
        KvPullServiceStub(channel),
    )
    sequence = worker_pb2.Sequence(
        sequence_id="stranger",
        token_ids=range(2, 40),
        sampling=inference_pb2.SamplingParams(temperature=0.0, top_p=1.0),
        stopping=inference_pb2.StoppingParams(max_tokens=2),
    )
    return {
        "Decode": worker.Decode(worker_pb2.DecodeRequest(sequence=sequence), timeout=WAIT_SECONDS),
        "Prefill": worker.Prefill(worker_pb2.PrefillRequest(sequence=sequence), timeout=WAIT_SECONDS),
        "Abort": worker.Abort(worker_pb2.AbortRequest(sequence_ids=["r"]), timeout=WAIT_SECONDS),
        "CopyBlocks": worker.CopyBlocks(worker_pb2.CopyBlocksRequest(), timeout=WAIT_SECONDS),
        "GetLoad": worker.GetLoad(worker_pb2.GetLoadRequest(), timeout=WAIT_SECONDS),
        "SetDraining": worker.SetDraining(
            worker_pb2.SetDrainingRequest(is_draining=True), timeout=WAIT_SECONDS
        ),
        "SetRole": worker.SetRole(worker_pb2.SetRoleRequest(role="prefill"), timeout=WAIT_SECONDS),
        "ClearCache": worker.ClearCache(worker_pb2.ClearCacheRequest(), timeout=WAIT_SECONDS),
        "ForgetBlocks": worker.ForgetBlocks(worker_pb2.ForgetBlocksRequest(), timeout=WAIT_SECONDS),
        "SetLogLevel": worker.SetLogLevel(worker_pb2.SetLogLevelRequest(), timeout=WAIT_SECONDS),
        "LoadAdapter": worker.LoadAdapter(worker_pb2.LoadAdapterRequest(), timeout=WAIT_SECONDS),
        "UnloadAdapter": worker.UnloadAdapter(worker_pb2.UnloadAdapterRequest(), timeout=WAIT_SECONDS),
        "Push": push.Push(nothing_sent(), timeout=WAIT_SECONDS),
        "Pin": pull.Pin(
            kv.PinRequest(holder_epoch=info.epoch, layout=info.layout, block_hashes=[bytes(16)]),
            timeout=WAIT_SECONDS,
        ),
        "Pull": pull.Pull(kv.PullRequest(lease_id="l", num_blocks=1), timeout=WAIT_SECONDS),
        "Renew": pull.Renew(kv.RenewRequest(lease_id="l"), timeout=WAIT_SECONDS),
        "Release": pull.Release(kv.ReleaseRequest(lease_id="l"), timeout=WAIT_SECONDS),
    }


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_strangers_calls_are_refused(cluster: RunningStack, name: str) -> None:
    async with grpc.aio.insecure_channel(cluster.ready[name].address) as channel:
        info = await WorkerServiceStub(channel).GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())
        calls = strangers_calls(channel, info)
        codes = {call: await each.code() for call, each in calls.items()}
        assert codes == dict.fromkeys(calls, grpc.StatusCode.UNAUTHENTICATED)
    async with connect(cluster) as (_, workers):
        await wait_until_idle(workers)


async def test_a_worker_with_another_secret_is_refused_with_the_reason_in_the_log(
    cluster: RunningStack, redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The stack's workers join this router; the misled one does not."""
    quire = str(Path(sys.executable).with_name("quire"))
    command = [quire, "decode", "--num-blocks", "64", "--threads", "1"]
    environment = {
        **os.environ,
        "QUIRE_REDIS_URL": redis.worker_url,
        "QUIRE_CLUSTER_SECRET": "another secret",
        "QUIRE_LOG_LEVEL": "error",
    }
    process = await asyncio.create_subprocess_exec(*command, env=environment)
    config = RouterConfig(
        port=0, redis_url=redis.router_url, cluster_secret=SECRET.encode(), poll_seconds=0.05
    )
    try:
        async with router(config) as running, asyncio.timeout(90):
            while not (refused := [r for r in caplog.records if r.message == "worker_refused"]):
                await asyncio.sleep(0.05)
            members = {worker.worker_id for worker in running.workers.all()}
        assert members <= {"prefill-0", "decode-0"}
        (fields,) = [vars(record)["fields"] for record in refused]
        assert "has another cluster secret" in fields["problem"]
        assert "QUIRE_CLUSTER_SECRET (--cluster-secret)" in fields["problem"]
    finally:
        process.kill()
        await process.wait()
