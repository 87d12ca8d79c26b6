"""Lists what the services of one worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.engine_thread import EngineThread
from quire.engine.kv_cache.memory import KvMemory
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.transports.interface import Transports
from quire.rpc.channels import ChannelPool
from quire.services.worker.blocks.block_reader import BlockReader
from quire.services.worker.blocks.prefix_pull import PrefixPuller
from quire.services.worker.identity import WorkerIdentity
from quire.services.worker.reports.metrics import PromptMetrics
from quire.services.worker.reports.worker_reports import WorkerReports
from quire.services.worker.requests.output_streams import OutputStreams
from quire.services.worker.requests.running_requests import RunningRequests
from quire.services.worker.requests.sequence_reader import SequenceReader
from quire.services.worker.state import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What prefill, decode and the calls for routers and operators work with.

    Attributes:
        address: returns the host:port at which others reach this worker; known once the server is bound.
        reader: turns the router's sequences into the engine's.
        blocks: reads the blocks that are sent to other workers.
        channels: the connections to other workers.
        transports: how blocks come from other workers and go to them.
        reports: reports the state to the routers.
        outputs: the streams in which routers get the outputs of their decodes.
        puller: fills the prefix cache from other workers.
    """

    identity: WorkerIdentity
    address: Callable[[], str]
    engine: EngineThread
    memory: KvMemory
    reader: SequenceReader
    requests: RunningRequests
    state: WorkerState
    reports: WorkerReports
    outputs: OutputStreams
    blocks: BlockReader
    channels: ChannelPool
    transports: Transports
    puller: PrefixPuller
    transfers: TransferMetrics
    prompts: PromptMetrics
