"""Opens the transport that the settings name."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from quire.engine.kv_cache.memory import KvMemory
from quire.kvtransfer.errors import NotSharedError
from quire.kvtransfer.frame import Transport
from quire.kvtransfer.transports.interface import OwnPool, Transports
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.kvtransfer.transports.pool_socket import default_directory
from quire.kvtransfer.transports.shared import SharedPools
from quire.services.server.log import EventLogger
from quire.services.worker.config import PLUG_INS, WorkerConfig
from quire.settings.setting import SettingError

_log = EventLogger("worker")


def open_transports(config: WorkerConfig, epoch: str, memory: KvMemory) -> Transports:
    """Offer the worker's pool to other workers, if the settings and the pool allow.

    Raises:
        SettingError: the plug-in that the settings name cannot offer this pool.
    """
    if config.transport == Transport.MESSAGES:
        return MESSAGES_ONLY
    if memory.frame_tables is not None and config.transport != "auto":
        raise SettingError(
            f"--transport {config.transport} is not possible: a block of a model that mixes layers with and "
            "without windows is no single run of bytes; leave it at auto"
        )
    if config.transport == "auto":
        return _share(config, epoch, memory)
    pool = OwnPool(
        epoch=epoch,
        address=memory.address,
        num_bytes=memory.num_bytes,
        device=memory.device.type,
        is_divided=config.tensor_parallel_size > 1,
        has_secret=bool(config.cluster_secret),
        has_tls=config.cluster_tls is not None,
    )
    try:
        [plug_in] = entry_points(group=PLUG_INS, name=config.transport)
        opened: Transports = plug_in.load()(pool, _log_transport)
    except (NotSharedError, OSError) as error:
        raise SettingError(f"--transport {config.transport} is not possible: {error}") from error
    return opened


def _share(config: WorkerConfig, epoch: str, memory: KvMemory) -> Transports:
    directory = Path(config.transport_dir) if config.transport_dir else default_directory()
    transports = SharedPools(directory, _log_transport)
    try:
        if memory.descriptor is None:
            raise OSError("the pool is not in memory that processes can share")
        transports.share(epoch, memory.descriptor)
    except OSError as error:
        _log.info("kv_transport", transport=Transport.MESSAGES, reason=f"this worker shares no pool: {error}")
    return transports


def _log_transport(peer_epoch: str, transport: Transport, reason: str) -> None:
    _log.info("kv_transport", peer_epoch=peer_epoch, transport=transport, reason=reason)
