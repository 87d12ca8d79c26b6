"""Connections between ranks: who may join, and that every failure is an error at the other end."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import trustme

from quire.engine.parallel.collectives import RanksError
from quire.engine.parallel.link import TOKEN_BYTES, FrameKind, Link, Purpose, Trust, accept, connect
from quire.services.server.tls import CLUSTER_NAME, TlsFiles
from quire.services.worker.rank_joins import link_trust

TOKEN = bytes(range(TOKEN_BYTES))


class Ends:
    """Both ends of a connection, or the error with which each end refused the other."""

    def __init__(self, ours: Trust, theirs: Trust) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            joining = pool.submit(connect, server.getsockname()[:2], Purpose.BLOCKS, TOKEN, theirs)
            self.accepted: tuple[Purpose, bytes, Link] | OSError
            try:
                self.accepted = accept(server.accept()[0], ours)
            except OSError as error:
                self.accepted = error
            self.joining = joining

    @property
    def links(self) -> tuple[Link, Link]:
        assert not isinstance(self.accepted, OSError), self.accepted
        return self.accepted[2], self.joining.result()


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    both = Ends(Trust(b"secret"), Trust(b"secret")).links
    with ExitStack() as stack:
        for each in both:
            stack.callback(each.close)
        yield both


def test_ends_with_one_secret_accept_each_other() -> None:
    ends = Ends(Trust(b"secret"), Trust(b"secret"))
    assert not isinstance(ends.accepted, OSError)
    assert ends.accepted[:2] == (Purpose.BLOCKS, TOKEN)
    for each in ends.links:
        each.close()


@pytest.mark.parametrize("secret", [b"", b"other"])
def test_a_stranger_is_refused(secret: bytes) -> None:
    ends = Ends(Trust(b"secret"), Trust(secret))
    assert isinstance(ends.accepted, OSError)
    assert "does not know the cluster's secret" in str(ends.accepted)
    with pytest.raises(RanksError):
        ends.joining.result()


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trust]:
    """Return what issues a certificate to a name, each from an authority of its own."""

    def issue(name: str) -> Trust:
        folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        issued = authority.issue_cert(name)
        (folder / "cert.pem").write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
        return link_trust(b"secret", TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem"))

    return issue


def test_with_certificates_strangers_are_refused(issue: Callable[[str], Trust]) -> None:
    trust = issue(CLUSTER_NAME)
    for stranger in (Trust(b"secret"), issue(CLUSTER_NAME)):
        ends = Ends(trust, stranger)
        assert isinstance(ends.accepted, OSError)
        with pytest.raises((OSError, RanksError)):
            ends.joining.result()
    for each in Ends(trust, trust).links:
        each.close()


def test_the_name_in_the_certificate_counts(issue: Callable[[str], Trust]) -> None:
    trust = issue("localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        Ends(trust, trust).joining.result()


def test_a_listener_that_only_repeats_is_refused() -> None:
    """Who does not know the secret can send back only what the rank itself has sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = server.getsockname()[:2]
        joining = pool.submit(connect, address, Purpose.STEPS, TOKEN, Trust(b"secret"))
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(32))
            hello = connection.recv(1024)
            connection.sendall(hello[-32:])
            with pytest.raises(RanksError, match="does not know the cluster's secret"):
                joining.result()


def test_what_is_no_rank_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()[:2]) as stranger,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 8)
        with pytest.raises(OSError, match="does not know the cluster's secret"):
            accept(server.accept()[0], Trust(b"secret"))


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
def test_a_frame_arrives_as_it_was_sent(links: tuple[Link, Link], size: int) -> None:
    parts = [bytes([7]) * size, b"end"]
    sending = threading.Thread(target=links[0].send, args=(FrameKind.WRITE, *parts))
    sending.start()
    kind, data = links[1].receive(FrameKind.READ, FrameKind.WRITE)
    assert (kind, bytes(data)) == (FrameKind.WRITE, b"".join(parts))
    sending.join()


def test_a_frame_of_another_size_or_kind_is_an_error(links: tuple[Link, Link]) -> None:
    links[0].send(FrameKind.END)
    with pytest.raises(RanksError, match="has ended"):
        links[1].receive(FrameKind.POOL)
    links[0].send(FrameKind.SUM, b"12345678")
    with pytest.raises(RanksError, match="has sent 8 bytes of kind 5"):
        links[1].receive_into(FrameKind.SUM, memoryview(bytearray(4)))
    links[1].send(FrameKind.SUM, b"")
    with pytest.raises(RanksError, match="has sent 0 bytes of kind 5"):
        links[0].receive(FrameKind.STEP, FrameKind.END)


def test_a_failure_is_told_to_the_other_end(links: tuple[Link, Link]) -> None:
    for receive in (
        lambda: links[1].receive(FrameKind.STEP),
        lambda: links[1].receive_into(FrameKind.SUM, memoryview(bytearray(4))),
    ):
        links[0].send(FrameKind.ERROR, b"no memory")
        with pytest.raises(RanksError, match=r"the worker at 127.0.0.1:\d+: no memory"):
            receive()


def test_a_closed_or_silent_end_is_an_error(links: tuple[Link, Link]) -> None:
    links[0].set_limit(0.05)
    with pytest.raises(RanksError, match="has not answered"):
        links[0].receive(FrameKind.DONE)
    assert not links[0].has_ended
    links[1].close()
    with pytest.raises(RanksError, match="has closed the connection"):
        links[0].receive(FrameKind.DONE)
    assert links[0].has_ended


def test_closing_ends_a_wait_in_another_thread(links: tuple[Link, Link]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(links[0].receive, FrameKind.DONE)
        links[0].close()
        with pytest.raises(RanksError):
            waiting.result(timeout=10)
