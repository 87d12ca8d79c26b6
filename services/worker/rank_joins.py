"""Waits until the other ranks of a worker have come, which `quire rank` starts on other machines."""

from __future__ import annotations

import queue
import socket
from contextlib import suppress
from threading import Thread
from typing import NamedTuple

from quire.engine.parallel.link import Link, Purpose, Trust, accept
from quire.engine.parallel.remote_ranks import RankLinks
from quire.services.server.log import get_logger
from quire.services.server.tls import CLUSTER_NAME, TlsFiles, client_context, server_context
from quire.settings.address import split_address

_REMINDER_SECONDS = 30.0
_LOOK_SECONDS = 0.2

_log = get_logger("worker")


def link_trust(secret: bytes, files: TlsFiles | None) -> Trust:
    """Return how the ranks of a cluster recognise each other.

    Raises:
        BadFileError: a certificate file is missing or malformed.
    """
    if files is None:
        return Trust(secret)
    return Trust(secret, server_context(files), client_context(files), CLUSTER_NAME)


class _Joined(NamedTuple):
    purpose: Purpose
    token: bytes
    link: Link


def await_ranks(address: str, num_others: int, trust: Trust) -> list[RankLinks]:
    """Listen until all other ranks of a worker have connected, and return their links in that order.

    Args:
        address: host:port to listen on.
        num_others: ranks besides rank 0.
        trust: how the ranks prove that they belong to the cluster.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in split_address(address)[0] else socket.AF_INET
    with socket.create_server(split_address(address), family=family, backlog=64) as server:
        _log.info("awaiting_ranks", address=address, missing=num_others)
        found = _collect(server, num_others, trust)
        _log.info("ranks_joined", ranks=num_others)
        return found


def _collect(server: socket.socket, num_others: int, trust: Trust) -> list[RankLinks]:
    server.settimeout(_LOOK_SECONDS)
    joined: queue.Queue[_Joined] = queue.Queue()
    by_token: dict[bytes, dict[Purpose, Link]] = {}
    waited = 0.0
    while True:
        with suppress(queue.Empty):
            while True:
                purpose, token, link = joined.get_nowait()
                by_token.setdefault(token, {})[purpose] = link
        for token, links in list(by_token.items()):
            if any(each.has_ended for each in links.values()):
                _log.warning("rank_left", rank=links.popitem()[1].peer)
                del by_token[token]
        whole = [each for each in by_token.values() if len(each) == len(Purpose)]
        if len(whole) >= num_others:
            return [RankLinks(each[Purpose.STEPS], each[Purpose.BLOCKS]) for each in whole[:num_others]]
        try:
            connection, _ = server.accept()
        except TimeoutError:
            waited += _LOOK_SECONDS
            if waited >= _REMINDER_SECONDS:
                waited = 0.0
                _log.warning("awaiting_ranks", missing=num_others - len(whole), remedy="start `quire rank`")
            continue
        # A stranger that sends nothing must not delay the others.
        Thread(target=_shake_hands, args=(connection, trust, joined), daemon=True).start()


def _shake_hands(connection: socket.socket, trust: Trust, joined: queue.Queue[_Joined]) -> None:
    try:
        joined.put(_Joined(*accept(connection, trust)))
    except OSError as error:
        _log.warning("rank_refused", reason=str(error))
