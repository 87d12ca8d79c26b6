"""The parts that the services of one worker share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.engine.engine_thread import EngineThread
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.structured_output.grammar import GrammarCompiler
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.transports.interface import Transports
from quire.rpc.channels import ChannelPool
from quire.rpc.proof import Caller
from quire.rpc.tls import cluster_connect
from quire.services.server.background import in_background
from quire.services.server.tracing import open_tracer
from quire.services.worker.blocks.block_reader import BlockReader
from quire.services.worker.blocks.prefix_pull import PrefixPuller
from quire.services.worker.blocks.transports import open_transports
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.lifecycle.adapters import Adapters
from quire.services.worker.lifecycle.start import Start
from quire.services.worker.reports.metrics import PromptMetrics, describe_role
from quire.services.worker.reports.worker_reports import WorkerReports
from quire.services.worker.requests.output_streams import OutputStreams
from quire.services.worker.requests.running_requests import RunningRequests
from quire.services.worker.requests.sequence_reader import SequenceReader
from quire.services.worker.state import WorkerState
from quire.tokenization.tokenizer import load_model_files


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts for prefill, decode and the calls of routers and operators.

    Attributes:
        address: returns the host:port at which others reach this worker; known once the server is bound.
        metrics_port: returns the port of its metrics; known then too.
        reader: turns the router's sequences into the engine's.
        blocks: reads the blocks that are sent to other workers.
        channels: the connections to other workers.
        transports: how blocks are copied between this worker and others.
        reports: reports the state to the routers.
        outputs: the streams in which routers get the outputs of their decodes.
        puller: fills the prefix cache from other workers.
    """

    identity: WorkerIdentity
    address: Callable[[], str]
    metrics_port: Callable[[], int]
    engine: EngineThread
    memory: KvMemory
    reader: SequenceReader
    requests: RunningRequests
    state: WorkerState
    adapters: Adapters
    reports: WorkerReports
    outputs: OutputStreams
    blocks: BlockReader
    channels: ChannelPool
    transports: Transports
    puller: PrefixPuller
    transfers: TransferMetrics
    prompts: PromptMetrics


async def assemble_parts(start: Start, engine: EngineThread) -> WorkerParts:
    """Open the shared parts: tracing, the connections to other workers, the compiler of formats."""
    config, identity, memory, stack = start.config, start.identity, start.models.memory, start.stack
    tracer = await stack.enter_async_context(
        open_tracer(
            config.otlp_endpoint,
            service=f"quire-{config.role}",
            instance=identity.worker_id,
            clock=time.perf_counter,
        )
    )
    channels = ChannelPool(cluster_connect(config.cluster_tls), Caller(config.cluster_secret))
    stack.push_async_callback(channels.close)
    transports = open_transports(config, identity.epoch, memory)
    stack.callback(transports.close)
    await stack.enter_async_context(in_background(channels.close_unused_forever()))
    model = start.models.model
    grammars = GrammarCompiler(lambda: _read_tokenizer(model.folder), model.vocab_size, model.eos_token_ids)
    reader = SequenceReader(identity, start.state, grammars)
    stack.callback(reader.close)
    prompts, transfers = PromptMetrics(start.registry), TransferMetrics(start.registry)
    adapters = Adapters(start.models.load_adapter, identity.model, start.state)
    await adapters.load_all(config.lora)
    reports = WorkerReports(start.state)
    describe_role(start.registry, lambda: start.state.role)
    return WorkerParts(
        identity=identity,
        address=start.address.result,
        metrics_port=start.metrics_port.result,
        engine=engine,
        memory=memory,
        reader=reader,
        requests=RunningRequests(engine, start.state, prompts.phases, tracer, reports.loads),
        state=start.state,
        adapters=adapters,
        reports=reports,
        outputs=OutputStreams(config.stream_interval),
        blocks=BlockReader(memory, await engine.call(lambda e: e.pool)),
        channels=channels,
        transports=transports,
        puller=PrefixPuller(engine, memory, identity.layout, channels, transfers, transports),
        transfers=transfers,
        prompts=prompts,
    )


def _read_tokenizer(folder: Path) -> str:
    return (load_model_files(str(folder)).folder / "tokenizer.json").read_text("utf-8")
