"""Declares a worker's settings. Importing this loads neither torch nor gRPC nor the model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from quire.engine.config import EngineConfig
from quire.engine.runner.lent_processors import SharedProcessors
from quire.engine.weights.weights_file import WeightsFile
from quire.models.source import model_name
from quire.rpc.loopback import REMEDY, is_loopback
from quire.services.server.config import ServiceConfig
from quire.settings.setting import MAX_PORT, Panel, is_address, setting

DEMO_MODEL = "demo"
"""Name under which the bundled model is served."""
WILDCARDS = frozenset({"0.0.0.0", "[::]"})
"""Hosts that stand for all addresses of a machine; clients cannot connect to them."""

TRANSPORTS = ("auto", "messages")
PLUG_INS = "quire.transports"
"""The group of entry points that open further transports."""


def _address_problem(address: str) -> str | None:
    return None if is_address(address) else f"must be host:port, as 10.0.0.7:9000; got {address!r}"


def _transport_problem(name: str) -> str | None:
    if name in TRANSPORTS or entry_points(group=PLUG_INS, name=name):
        return None
    others = entry_points(group=PLUG_INS).names
    return f"must be one of {', '.join([*TRANSPORTS, *sorted(others)])}; got {name!r}"


def _lora_problem(named: tuple[str, ...]) -> str | None:
    bad = [each for each in named if not all(each.partition("=")[::2])]
    return f"must be name=folder or name=hub id; got {bad[0]!r}" if bad else None


class DiskFolder(NamedTuple):
    """The folder for blocks on disk, and the most bytes of them."""

    path: str
    num_bytes: int

    def of(self, name: str) -> DiskFolder:
        """Return a subfolder for one of several workers."""
        return self._replace(path=str(Path(self.path) / name))


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ServiceConfig, EngineConfig):
    """Settings of a worker.

    Attributes:
        stream_interval: longest time in seconds that tokens wait to share a message; 0 sends each at once.
        num_sharing: number of workers, itself included, that divide the memory of its GPU or machine.
        cpus: processors to run on; None: all.
        kv_events: host:port at which it publishes KV events, by default the variable QUIRE_KV_EVENTS; it
            replays them at the next port. None: it publishes none.
        shares_processors: whether other workers may use its processors.
        shared_processors: the workers that lend each other these processors; None: no others.
        weights_file: the file in which workers share the model's weights; None: its weights are its own.
        num_weights_files: number of such files on its machine, one for each NUMA node with a worker.
        worker_id: name in the cluster; None makes one.
        max_step_seconds: the worker ends if its engine hangs in one step for this long and for ten times its
            longest recent step.
        lease_ttl_seconds: time after which Redis forgets a worker that no longer renews its lease.
        notice_seconds: seconds after SIGTERM in which it still accepts requests, since routers may not have
            noticed yet.

    Raises:
        ValueError: settings are out of range or contradict each other.
    """

    role: Literal["prefill", "decode"]
    port: int = setting(
        0, "--port", "gRPC port; 0 takes a free one.", Panel.COMMON, minimum=0, maximum=MAX_PORT
    )
    advertise: str | None = setting(
        None,
        "--advertise",
        "host:port at which others reach it; by default host and port, with --host 0.0.0.0 the address that "
        "leads to Redis.",
        Panel.NETWORK,
        problem=_address_problem,
    )
    vllm_grpc: bool = setting(
        False,
        "--vllm-grpc",
        "Workers serve vllm.grpc.engine.VllmEngine too, for gateways of vLLM (extra vllm-grpc).",
        Panel.NETWORK,
    )
    transport: str = setting(
        "auto",
        "--transport",
        "How workers take KV blocks from each other: auto copies them out of the other's memory on one host, "
        "and sends messages elsewhere; messages always sends them. Any other name is that of a plug-in; see "
        "docs/transport.md.",
        Panel.NETWORK,
        problem=_transport_problem,
    )
    transport_dir: str | None = setting(
        None,
        "--transport-dir",
        "Directory of this user, mode 0700, in which workers of one host find each other's memory.",
        Panel.NETWORK,
        shown_default="quire-<user id> in the directory for temporary files",
    )
    host_cache_bytes: int = setting(
        0,
        "--host-cache",
        "Host memory for cached blocks that the pool evicts, such as 1GiB; 0 for none.",
        Panel.CACHE,
        minimum=0,
        is_size=True,
    )
    disk_cache: DiskFolder | None = setting(
        None,
        "--disk-cache",
        "Folder and size for cached blocks that the host cache evicts, such as /var/cache/quire:20GiB.",
        Panel.CACHE,
    )
    lora: tuple[str, ...] = setting(
        (),
        "--lora",
        "Adapter (LoRA) to serve, as name=folder or name=hub id; requests name it as their model. May be "
        "repeated; on the CPU.",
        Panel.MODEL,
        problem=_lora_problem,
    )
    stream_interval: float = 0.05
    num_sharing: int = 1
    cpus: tuple[int, ...] | None = None
    kv_events: str | None = field(default_factory=lambda: os.environ.get("QUIRE_KV_EVENTS") or None)
    shares_processors: bool = False
    shared_processors: SharedProcessors | None = None
    weights_file: WeightsFile | None = None
    num_weights_files: int = 1
    worker_id: str | None = None
    max_step_seconds: float = 60.0
    lease_ttl_seconds: float = 10.0
    notice_seconds: float = 0.5

    def __post_init__(self) -> None:
        ServiceConfig.__post_init__(self)
        EngineConfig.__post_init__(self)
        self.check_distinct({"--port": self.port, "--metrics-port": self.metrics_port})
        if self.disk_cache is not None and not self.host_cache_bytes:
            raise ValueError("--disk-cache needs --host-cache: blocks are moved through host memory")
        if self.vllm_grpc and find_spec("smg_grpc_proto") is None:
            raise ValueError(
                "--vllm-grpc needs the extra 'vllm-grpc': in quire's clone, run "
                ".venv/bin/pip install -e '.[vllm-grpc]'"
            )
        if self.kv_events is not None:
            self._check_kv_events(self.kv_events)
        if self.host in WILDCARDS and self.advertise is None and self.redis_url is None:
            raise ValueError(f"others cannot connect to {self.host}: give --advertise host:port too")
        if not self.cluster_secret and not self.cluster_cert and not is_loopback(self.host):
            raise ValueError(
                f"strangers can reach a worker on {self.host}, and without a cluster secret it serves them: "
                f"{REMEDY}; `openssl rand -hex 32` makes one. Or use --cluster-cert, --cluster-key and "
                "--cluster-ca, or leave --host on the loopback"
            )

    def _check_kv_events(self, address: str) -> None:
        if not is_address(address) or address.endswith(f":{MAX_PORT}"):
            raise ValueError(f"QUIRE_KV_EVENTS must be host:port, with a port after it; got {address!r}")
        if not all(map(find_spec, ("zmq", "msgpack"))):
            raise ValueError(
                "QUIRE_KV_EVENTS needs the extra 'events': in quire's clone, run "
                ".venv/bin/pip install -e '.[events]'"
            )

    @property
    def model_name(self) -> str:
        """Name under which the model is served."""
        default = model_name(self.model) if self.model else DEMO_MODEL
        return self.served_model_name or default


class RunningWorker(NamedTuple):
    """A worker that serves.

    Attributes:
        address: host:port of its gRPC services.
        metrics_port: port of its metrics.
        num_blocks: blocks of its pool.
        max_model_len: most tokens of a sequence.
        epoch: identifies this start of the worker.
    """

    worker_id: str
    address: str
    metrics_port: int
    model: str
    num_blocks: int
    max_model_len: int
    epoch: str
