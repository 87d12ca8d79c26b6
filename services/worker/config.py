"""Holds a worker's settings; importing this loads neither torch nor the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from quire.engine.speculation_config import SpeculationConfig
from quire.kvindex.membership import POLL_SECONDS
from quire.models.bundled import demo_model_path
from quire.models.source import model_name
from quire.services.server.cluster_proof import require_privacy
from quire.services.server.tls import TlsFiles
from quire.services.worker.address import WILDCARDS

DEFAULT_SWAP_BYTES = 64 << 20
MAX_INDEX_STRIDE = 64
DEMO_MODEL = "demo"
"""Name under which the bundled model is served."""


class DiskFolder(NamedTuple):
    """Where blocks may lie on disk, and how many bytes of them."""

    path: str
    num_bytes: int

    def of(self, name: str) -> DiskFolder:
        """Return a folder within, for one of several workers."""
        return self._replace(path=str(Path(self.path) / name))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a worker needs to know.

    Attributes:
        model: folder or hub id; None is the bundled demo.
        advertise: host:port at which others reach it; None is where it listens, on all addresses the one that
            leads to Redis.
        redis_url: where it publishes its blocks; None leaves it to routers that list its address.
        kv_cache_dtype: "auto" (the model's own), "fp8" or "int8".
        kv_memory_bytes: size of the block pool; overridden by ``num_blocks``.
        preemption: "swap", "recompute", or "auto", whichever is measured to be cheaper.
        speculation: "ngram", "draft" or "off": how a decode worker guesses tokens.
        num_speculative_tokens: most guesses for one sequence in a step.
        draft_model: folder or hub id of the model that guesses.
        num_sharing_gpu: workers on this worker's GPU, itself among them: each takes its part of the memory.
        swap_memory_bytes: host memory for the blocks of preempted requests.
        host_cache_bytes: host memory for blocks that the pool evicts.
        disk_cache: where blocks lie that the host memory evicts.
        index_stride: every how many blocks one is published.
        cpus: processors to stay on; None is all.
        threads: threads of a step; None is one for each processor that it may keep busy.
        cluster_secret: keys the block hashes, and proves who belongs to the cluster; must be the router's.
        notice_seconds: how long after SIGTERM it still takes requests, from routers that do not know yet.
        max_step_seconds: after this long in one step, or ten times the longest step of late if that is more,
            the engine is stuck and the process ends.
        grace_seconds: how long requests may go on after SIGTERM; routers continue the rest elsewhere.
        vllm_grpc: serve ``vllm.grpc.engine.VllmEngine`` too.
        cluster_tls: certificates of the connections from routers and between workers; None leaves them plain.
        otlp_endpoint: where spans go, as http://host:4317; None traces nothing.

    Raises:
        ValueError: settings contradict each other.
    """

    role: Literal["prefill", "decode"]
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    redis_url: str | None = field(default=None, repr=False)
    metrics_port: int = 0
    served_model_name: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    num_sharing_gpu: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    preemption: str = "auto"
    swap_memory_bytes: int = DEFAULT_SWAP_BYTES
    speculation: str = "off"
    num_speculative_tokens: int = 4
    draft_model: str | None = None
    host_cache_bytes: int = 0
    disk_cache: DiskFolder | None = None
    index_stride: int = 1
    cpus: tuple[int, ...] | None = None
    threads: int | None = None
    worker_id: str | None = None
    cluster_secret: bytes = field(default=b"", repr=False)
    cluster_tls: TlsFiles | None = None
    vllm_grpc: bool = False
    request_timeout_seconds: float = 600.0
    lease_ttl_seconds: float = 10.0
    max_step_seconds: float = 60.0
    notice_seconds: float = 1.5 * POLL_SECONDS
    otlp_endpoint: str | None = None
    grace_seconds: float = 5.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        if self.num_blocks is not None and self.kv_memory_bytes is not None:
            raise ValueError("give --num-blocks or --kv-memory, not both")
        SpeculationConfig(self.speculation, self.num_speculative_tokens, self.draft_model)
        if self.disk_cache is not None and not self.host_cache_bytes:
            raise ValueError("--disk-cache needs --host-cache: blocks come and go through host memory")
        if not 1 <= self.index_stride <= MAX_INDEX_STRIDE:
            raise ValueError(f"--index-stride must be from 1 to {MAX_INDEX_STRIDE}, got {self.index_stride}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least "
                f"--max-num-seqs ({self.max_num_seqs})"
            )
        if self.vllm_grpc and find_spec("smg_grpc_proto") is None:
            raise ValueError(
                "--vllm-grpc needs the extra 'vllm-grpc': pip install 'quire-llm[vllm-grpc]', or in a clone "
                ".venv/bin/pip install -e '.[vllm-grpc]'"
            )
        if self.host in WILDCARDS and self.advertise is None and self.redis_url is None:
            raise ValueError(f"others cannot connect to {self.host}: give --advertise host:port too")
        require_privacy(self.host, self.cluster_secret, has_tls=self.cluster_tls is not None)

    @property
    def speculation_config(self) -> SpeculationConfig:
        """How tokens are guessed."""
        return SpeculationConfig(self.speculation, self.num_speculative_tokens, self.draft_model)

    @property
    def model_path(self) -> str:
        """Folder or hub id of the model, as it was named."""
        return self.model or str(demo_model_path())

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        default = model_name(self.model) if self.model else DEMO_MODEL
        return self.served_model_name or default


class RunningWorker(NamedTuple):
    """A worker that answers.

    Attributes:
        address: host:port of its gRPC services.
        metrics_port: port of its metrics.
        num_blocks: blocks of its pool.
        max_model_len: most tokens of a sequence.
        epoch: names this start of the worker.
    """

    worker_id: str
    address: str
    metrics_port: int
    model: str
    num_blocks: int
    max_model_len: int
    epoch: str
