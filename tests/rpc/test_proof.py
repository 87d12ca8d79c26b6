"""Proofs of the cluster secret: what each one is valid for, and what a caller does with a wrong one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.rpc.proof import (
    ANSWER_KEY,
    CHALLENGE_KEY,
    PROOF_KEY,
    Caller,
    Peer,
    answer_proof,
    call_proof,
    is_equal,
    proof,
)
from tests.testing.rpc_errors import error_of

SECRET = b"secret"
ADDRESS, EPOCH = "10.0.0.5:9000", "epoch"
PUSH, LOAD = "/quire.v1.KvTransferService/Push", "/quire.v1.WorkerService/GetLoad"

texts = st.lists(st.text(max_size=4), min_size=1, max_size=4)


@given(a=texts, b=texts)
def test_a_proof_is_valid_for_exactly_its_parts(a: list[str], b: list[str]) -> None:
    assert (proof(SECRET, *a) == proof(SECRET, *b)) == (a == b)
    assert proof(SECRET, *a) != proof(b"another", *a)


@given(given=st.text(), expected=st.text())
def test_proofs_are_compared_as_texts(given: str, expected: str) -> None:
    assert is_equal(given, expected) == (given == expected)


def test_every_call_has_a_proof_of_its_own() -> None:
    one, other = Caller(SECRET), Caller(SECRET)
    signed = [caller.sign(PUSH, EPOCH) for caller in (one, one, other)]
    assert len(set(signed)) == 3
    for text, count in zip(signed, "121", strict=True):
        epoch, name, its_count, its_proof = text.split(" ")
        assert (epoch, its_count) == (EPOCH, count)
        assert its_proof == call_proof(SECRET, PUSH, EPOCH, name, count)
    assert signed[0].split(" ")[1] != signed[2].split(" ")[1]


class Channel:
    """Keeps the metadata of calls."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    def unary_unary(self, method: str, **options: Any) -> Callable[..., Any]:
        return lambda request, metadata=(), **options: self.metadata.update(metadata)

    unary_stream = stream_stream = unary_unary


class Call:
    """A call that was answered with this proof, or has ended with this status."""

    def __init__(self, answer: str | None, code: grpc.StatusCode | None = None) -> None:
        self._answer, self._code = answer, code
        self.is_cancelled = False

    async def initial_metadata(self) -> dict[str, str | None]:
        return {ANSWER_KEY: self._answer}

    def done(self) -> bool:
        return self._code is not None

    async def code(self) -> grpc.StatusCode | None:
        return self._code

    def cancel(self) -> None:
        self.is_cancelled = True


def peer(secret: bytes = SECRET) -> tuple[Peer, Channel]:
    channel = Channel()
    return Peer(cast(grpc.aio.Channel, channel), Caller(secret), ADDRESS, EPOCH), channel


@pytest.mark.parametrize(("method", "is_answered"), [(PUSH, True), (LOAD, False)])
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
def test_signed_calls_keep_their_own_metadata(kind: str, method: str, is_answered: bool) -> None:
    signing, channel = peer()
    getattr(signing, kind)(method)("request", metadata=(("traceparent", "00"),))
    assert channel.metadata["traceparent"] == "00"
    assert channel.metadata[PROOF_KEY].startswith(f"{EPOCH} ")
    assert (CHALLENGE_KEY in channel.metadata) == is_answered


async def test_without_a_secret_nothing_is_signed_or_checked() -> None:
    unsigned, channel = peer(b"")
    unsigned.unary_unary(PUSH)("request")
    assert channel.metadata == {}
    await unsigned.check(Call(None))


Answer = Callable[[str], str | None]


def answered(answer: Answer, code: grpc.StatusCode | None = None) -> tuple[Peer, Call]:
    """Return a peer and its call, whose callee answers the challenge in this way."""
    signing, channel = peer()
    signing.unary_unary(PUSH)("request")
    return signing, Call(answer(channel.metadata[CHALLENGE_KEY]), code)


async def test_the_worker_that_was_called_is_accepted() -> None:
    signing, call = answered(lambda challenge: answer_proof(SECRET, challenge, EPOCH, ADDRESS))
    await signing.check(call)
    assert not call.is_cancelled


@pytest.mark.parametrize(
    "answer",
    [
        lambda challenge: None,
        lambda challenge: "é",
        lambda challenge: answer_proof(b"another", challenge, EPOCH, ADDRESS),
        lambda challenge: answer_proof(SECRET, "an older one", EPOCH, ADDRESS),
        lambda challenge: answer_proof(SECRET, challenge, "e0", ADDRESS),
        lambda challenge: answer_proof(SECRET, challenge, EPOCH, "10.0.0.66:9000"),
        lambda challenge: proof(SECRET, "call", challenge, EPOCH, ADDRESS),
    ],
)
@pytest.mark.parametrize("code", [None, grpc.StatusCode.OK])
async def test_another_process_is_refused(answer: Answer, code: grpc.StatusCode | None) -> None:
    signing, call = answered(answer, code)
    await error_of(signing.check(call), grpc.StatusCode.UNAUTHENTICATED, ADDRESS)
    assert call.is_cancelled


async def test_a_call_that_has_failed_keeps_its_own_error() -> None:
    signing, call = answered(lambda challenge: None, grpc.StatusCode.RESOURCE_EXHAUSTED)
    await signing.check(call)
    assert not call.is_cancelled


async def test_a_cancelled_check_cancels_the_call() -> None:
    class Silent(Call):
        async def initial_metadata(self) -> dict[str, str | None]:
            await asyncio.Event().wait()
            return {}

    call = Silent(None)
    checking = asyncio.create_task(peer()[0].check(call))
    await asyncio.sleep(0)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert call.is_cancelled
