"""A worker whose engine fails says so and ends: a supervisor may start it anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub

SECONDS = 60.0
WORKER = """
import json
from quire.engine.model_runner import ModelRunner
from quire.services.worker.app import WorkerConfig, run_worker

def forward(self, arguments):
    raise RuntimeError("out of memory")

def on_ready(running):
    ModelRunner.forward = forward
    print(json.dumps(running.address), flush=True)

run_worker(WorkerConfig(role="decode", num_blocks=16, max_model_len=64, grace_seconds=30.0), on_ready)
"""


@contextmanager
def failing_worker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_failed_engine_ends_the_worker() -> None:
    with failing_worker() as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())
        with grpc.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=SECONDS
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            request = worker_pb2.DecodeRequest(
                sequence=worker_pb2.Sequence(
                    request_id="r",
                    token_ids=[5, 6, 7],
                    sampling=pb.SamplingParams(temperature=1.0, top_p=1.0),
                    stopping=pb.StoppingParams(max_tokens=4),
                )
            )
            with pytest.raises(grpc.RpcError) as failed:
                list(WorkerServiceStub(channel).Decode(request, timeout=SECONDS))
            assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "out of memory" in failed.value.details()
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        _, log = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "the engine failed and stops" in log
