"""Runs one worker as a process: composes its services, prefill, decode and vLLM's, over one engine.

Importing this loads neither torch nor the model.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.engine.runner.processors import num_cores
from quire.rpc.cluster_proof import ClusterTrust
from quire.rpc.server import Service, end_on_signals
from quire.services.server.process import raise_open_file_limit
from quire.services.worker.config import RunningWorker, WorkerConfig

if TYPE_CHECKING:
    from quire.services.worker.parts import WorkerParts

WORKER_SERVICE = "quire.v1.WorkerService"
KV_SERVICE = "quire.v1.KvTransferService"


def run_worker(config: WorkerConfig, on_ready: Callable[[RunningWorker], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; ``on_ready`` is called once requests can be served."""
    end_on_signals()
    _limit_processors(config)
    raise_open_file_limit()
    # Imported objects are never freed, but the garbage collector would visit them six times during the
    # imports.
    gc.disable()
    from quire.services.worker.main import serve

    gc.freeze()
    gc.enable()
    try:
        asyncio.run(serve(config, _services, on_ready))
    finally:
        if any(thread.name == "engine" for thread in threading.enumerate()):
            # A device that hangs would also block the interpreter's exit.
            os._exit(1)


async def _services(config: WorkerConfig, parts: WorkerParts) -> list[Service]:
    """Return a worker's services. Both roles have prefill and decode, so a decode worker can prefill."""
    from quire.kvtransfer.push_receiver import KvTransferServicer
    from quire.protos import kvtransfer_pb2_grpc, worker_pb2_grpc
    from quire.services.decode.calls import DecodeCalls
    from quire.services.decode.tickets import Tickets
    from quire.services.prefill.calls import PrefillCalls
    from quire.services.worker.servicer import WorkerServicer

    tickets = Tickets(parts.engine, parts.memory, parts.identity.layout, parts.identity.epoch)
    worker = WorkerServicer(parts, PrefillCalls(parts).prefill, DecodeCalls(parts, tickets).decode)
    receiver = KvTransferServicer(tickets, parts.transfers, parts.transports)
    services = [
        Service(worker_pb2_grpc.add_WorkerServiceServicer_to_server, worker, WORKER_SERVICE),
        Service(kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server, receiver, KV_SERVICE),
    ]
    if config.vllm_grpc:
        # Needs an extra.
        from quire.services.vllm_adapter.servicer import vllm_service

        trust = ClusterTrust(config.cluster_secret, has_tls=config.cluster_tls is not None)
        services.append(await asyncio.to_thread(vllm_service, worker, parts, config.max_num_seqs, trust))
    return services


def _limit_processors(config: WorkerConfig) -> None:
    """Bind the worker to its processors; call this before torch starts its threads.

    If workers share processors, their spinning threads slow each other down: a step of 2 ms took 150 ms.
    """
    if config.cpus is not None:
        # The stack has chosen them at its start, and the system may have taken some of them away since then.
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, allowed.intersection(config.cpus) or allowed)
    threads = config.threads or num_cores()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
