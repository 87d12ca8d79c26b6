"""Declares the settings of a local stack; importing this loads no gRPC."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

from quire.services.router.config import RouterConfig
from quire.services.server.config import LogLevel
from quire.services.worker.config import WorkerConfig
from quire.settings.setting import Panel, check_settings, setting

_BY_NODE = "1; without both flags, half the NUMA nodes if there are more than 2"


@dataclass(frozen=True, kw_only=True)
class LocalStackConfig:
    """Settings of a router, its workers and Redis on one machine.

    Attributes:
        redis_url: URL of an existing Redis; None: start a private one.
        router: settings of the router; Redis and secret are filled in. The workers' metrics ports follow the
            router's.
        worker: settings of all workers; role, name, Redis, secret, processors and ports are filled in.
        log_level: lowest severity of the events that processes log.

    Raises:
        ValueError: a setting is out of range.
    """

    num_prefill: int | None = setting(
        None, "--prefill", "Prefill workers.", Panel.COMMON, minimum=0, shown_default=_BY_NODE
    )
    # Decode workers generate the tokens, so there has to be one.
    num_decode: int | None = setting(
        None, "--decode", "Decode workers.", Panel.COMMON, minimum=1, shown_default=_BY_NODE
    )
    ray: str | None = setting(
        None,
        "--ray",
        "Workers run on the nodes of this Ray cluster: host:port of its head, auto for this machine's "
        "cluster, local to start one here (extra ray).",
        Panel.PROCESS,
    )
    redis_url: str | None = field(default=None, repr=False)
    router: RouterConfig = field(default_factory=RouterConfig)
    worker: WorkerConfig = field(default_factory=lambda: WorkerConfig(role="decode"))
    log_level: LogLevel = "warning"

    def __post_init__(self) -> None:
        check_settings(self)
        if self.ray is not None and find_spec("ray") is None:
            raise ValueError(
                "--ray needs the extra 'ray': in quire's clone, run .venv/bin/pip install -e '.[ray]'"
            )
