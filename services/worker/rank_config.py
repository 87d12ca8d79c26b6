"""Holds the settings of a rank on another machine than its worker's; importing this loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.server.config import ClusterConfig
from quire.settings.address import is_address
from quire.settings.setting import Panel, setting


def _leader_problem(address: str) -> str | None:
    return None if is_address(address) else f"must be the worker's --rank-address, host:port; got {address!r}"


@dataclass(frozen=True, kw_only=True)
class RankConfig(ClusterConfig):
    """Settings of a rank; the worker tells it all others.

    Raises:
        ValueError: settings are out of range or contradict each other.
    """

    leader: str = setting(
        "", "LEADER", "host:port of the worker's --rank-address.", Panel.NETWORK, problem=_leader_problem
    )
    model: str | None = setting(
        None,
        "--model",
        "Folder or hub id of the model on this machine; by default what the worker names. It must be the "
        "same model.",
        Panel.MODEL,
    )
    threads: int | None = setting(
        None,
        "--threads",
        "CPU threads of a step; by default all of this machine's processors.",
        Panel.PROCESS,
        minimum=1,
    )
