"""Runs one rank of a worker on another machine than the worker's.

Importing this loads neither torch nor the model.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from quire.services.server.grpc_server import STOP_SIGNALS, end_on_signals
from quire.services.server.log import configure_logging, get_logger
from quire.services.worker.processors import limit_threads
from quire.services.worker.rank_config import RankConfig
from quire.settings.address import split_address

if TYPE_CHECKING:
    from quire.engine.parallel.link import Trust
    from quire.engine.parallel.remote_ranks import RankLinks

_AGAIN_SECONDS = 1.0
"""Interval at which a rank tries to reach a worker that does not listen."""

_log = get_logger("rank")


def run_rank_process(config: RankConfig, on_ready: Callable[[int], None] | None = None) -> None:
    """Join a worker as one of its ranks, and run its steps until it ends.

    SIGTERM or SIGINT lets the worker drain and end, and this process with it. A second signal ends this
    process at once, and the worker fails.

    Args:
        on_ready: called with the number of the rank when it can run steps.

    Raises:
        OSError: the worker refuses this rank, or has failed.
        SettingError: the model cannot be divided.
    """
    configure_logging(config.log_level, role="rank")
    end_on_signals()
    limit_threads(config.threads)
    import torch

    from quire.engine.parallel.collectives import RanksError
    from quire.engine.parallel.remote_rank import run_rank
    from quire.engine.parallel.remote_settings import RemoteSettings
    from quire.services.worker.rank_joins import link_trust

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    def tell_ready(settings: RemoteSettings) -> None:
        _log.info("rank_ready", rank=settings.rank, ranks=settings.sizes.num_ranks, leader=config.leader)
        if on_ready is not None:
            on_ready(settings.rank)

    try:
        links = _join(config.leader, link_trust(config.cluster_secret, config.cluster_tls))
        run_rank(links, config.model, _leave_on_signals(), tell_ready)
    except RanksError as error:
        raise ChildProcessError(f"this rank of the worker at {config.leader} has ended: {error}") from error
    except ValueError as error:
        raise OSError(f"this rank of the worker at {config.leader} cannot run: {error}") from error
    _log.info("rank_ended", leader=config.leader)


def _join(leader: str, trust: Trust) -> RankLinks:
    """Connect to the worker, and wait until it listens."""
    from quire.engine.parallel.collectives import RanksError
    from quire.engine.parallel.link import TOKEN_BYTES, Purpose, connect
    from quire.engine.parallel.remote_ranks import RankLinks

    token, has_told = secrets.token_bytes(TOKEN_BYTES), False
    while True:
        try:
            links = RankLinks(*(connect(split_address(leader), each, token, trust) for each in Purpose))
            _log.info("rank_joined", leader=leader)
            return links
        except RanksError as error:
            raise RanksError(
                f"{error} in the handshake: do both have the same QUIRE_CLUSTER_SECRET and certificates?"
            ) from error
        except OSError as error:
            if not has_told:
                _log.info("awaiting_worker", leader=leader, reason=str(error))
                has_told = True
            time.sleep(_AGAIN_SECONDS)


def _leave_on_signals() -> Event:
    """Return an event that is set by the first signal to end; the second ends this process."""
    leaving = Event()

    def leave(number: int, frame: FrameType | None) -> None:
        if leaving.is_set():
            os._exit(128 + number)
        leaving.set()

    for each in STOP_SIGNALS:
        signal.signal(each, leave)
    return leaving
