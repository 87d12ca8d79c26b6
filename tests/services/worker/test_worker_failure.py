"""What a worker says to its requests when its engine fails or hangs, or when its time to drain is over."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client.errors import from_rpc_error
from quire.models.source import demo_model_path
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.rpc.errors import DRAINING, ENGINE_FAILED
from tests.testing.processes import ScriptedWorker, scripted_workers

pytestmark = pytest.mark.slow

SECONDS = 60.0
PROGRAM = """
import time
from quire.engine.runner import step_watch

step_watch.STALL_SECONDS = 0.5
whole = ModelRunner.forward

def fail(self, arguments):
    raise RuntimeError("out of memory")

steps = iter([whole, whole])

def fail_later(self, arguments):
    return next(steps, fail)(self, arguments)

def hang(self, arguments):
    time.sleep(3600)

def crawl(self, arguments):
    time.sleep(0.1)
    return whole(self, arguments)

def begin():
    ModelRunner.forward = globals()[sys.argv[2]]

settings.update(num_blocks=16, max_model_len=256, log_level="info")
settings.update(grace_seconds=float(sys.argv[3]), max_step_seconds=float(sys.argv[4]))
"""


def request(max_tokens: int) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        sequence=worker_pb2.Sequence(
            sequence_id="r",
            token_ids=[5, 6, 7],
            sampling=pb.SamplingParams(temperature=1.0, top_p=1.0),
            stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        ),
        output_channel=worker_pb2.OutputChannel(stream_id="open"),
    )


@contextmanager
def opened(address: str) -> Iterator[tuple[grpc.Channel, WorkerServiceStub]]:
    """Connect to a worker, and keep the stream open that the request names."""
    with grpc.insecure_channel(address) as channel:
        stub = WorkerServiceStub(channel)
        outputs = stub.StreamOutputs(worker_pb2.StreamOutputsRequest(stream_id="open"))
        next(outputs)
        yield channel, stub
        outputs.cancel()


@contextmanager
def running_worker(
    forward: str, grace_seconds: float = 30.0, max_step_seconds: float = 60.0
) -> Iterator[ScriptedWorker]:
    """Run a worker whose steps hang or crawl from the first request on, or fail after two steps."""
    arguments = (forward, grace_seconds, max_step_seconds)
    with scripted_workers(PROGRAM, demo_model_path(), *arguments) as [worker]:
        yield worker


@pytest.mark.parametrize(
    ("defect", "details", "event"),
    [("fail_later", "out of memory", "the engine failed and stops"), ("hang", "is stuck", "engine_stuck")],
)
def test_a_broken_engine_ends_the_worker(defect: str, details: str, event: str) -> None:
    with running_worker(defect, max_step_seconds=1.0) as worker:
        with opened(worker.address) as (channel, stub):
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=SECONDS
            )
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.RpcError) as failed:
                list(stub.Decode(request(4), timeout=SECONDS))
            error = from_rpc_error(failed.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, ENGINE_FAILED)
            assert details in error.message
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()
        assert worker.process.wait(SECONDS) == 1
        assert event in worker.process.stderr.read()


def http_status(port: int, path: str, seconds: float = SECONDS) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=seconds) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def probes(worker: ScriptedWorker) -> tuple[int, int]:
    """Return the answers about readiness and health."""
    return http_status(worker.metrics_port, "/ready"), http_status(worker.metrics_port, "/health")


def health_of(channel: grpc.Channel, seconds: float = SECONDS) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds).status


def test_a_slow_worker_answers_no_probe_while_it_is_stopped_and_an_error_after_its_grace() -> None:
    with running_worker("crawl", 0.5) as worker:
        with opened(worker.address) as (channel, stub):
            assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
            assert probes(worker) == (200, 200)
            worker.process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.RpcError):
                health_of(channel, 0.5)
            for path in ("/ready", "/health"):
                with pytest.raises(TimeoutError):
                    http_status(worker.metrics_port, path, 0.5)
            # The system still accepts connections, so a probe that only connects would be green.
            socket.create_connection(("127.0.0.1", worker.metrics_port), SECONDS).close()
            worker.process.send_signal(signal.SIGCONT)
            assert health_of(channel) == health_pb2.HealthCheckResponse.SERVING
            assert probes(worker) == (200, 200)
            responses = stub.Decode(request(200), timeout=SECONDS)
            assert next(responses).HasField("accepted")
            worker.process.terminate()
            with pytest.raises(grpc.RpcError) as ended:
                list(responses)
            error = from_rpc_error(ended.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, DRAINING)
        assert worker.process.wait(SECONDS) == 0


def test_a_worker_whose_engine_hangs_reports_it_and_ends_on_sigterm() -> None:
    with running_worker("hang", grace_seconds=0.2) as worker:
        with opened(worker.address) as (channel, stub):
            reports = stub.WatchWorker(worker_pb2.WatchWorkerRequest(), timeout=SECONDS)
            assert not next(reports).is_stalled
            call = stub.Decode(request(4), timeout=SECONDS)
            # The load of the request is told first.
            assert any(report.is_stalled for report in reports)
            assert stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=SECONDS).is_stalled
            assert health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert probes(worker) == (503, 200)
            worker.process.terminate()
            with pytest.raises(grpc.RpcError):
                list(call)
        assert worker.process.wait(SECONDS) == 1
        assert "engine_not_stopped" in worker.process.stderr.read()
