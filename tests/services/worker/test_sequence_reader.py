"""The reader of sequences: formats are compiled apart, in a limited time, and never block other requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from quire.engine.structured_output.grammar import StructuredOutputUnavailableError
from quire.engine.structured_output.grammar_compile import BadFormatError
from quire.kvindex.block_hash import block_hash
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.errors import InvalidArgument, ServiceError
from quire.services.worker.requests import sequence_reader
from quire.services.worker.requests.sequence_reader import INLINE_HASH_TOKENS, SequenceReader
from quire.services.worker.state import WorkerState
from quire.tokenization.tokenizer import MissingTokenizerError

BLOCK_SIZE = 4


class Grammars:
    """Compiles formats when it may, or fails; ``cached`` is what needs no compiling."""

    def __init__(self) -> None:
        self.cached: Any = None
        self.error: Exception | None = None
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.compiled: list[tuple[str, int]] = []
        self.threads: set[int] = set()
        self.is_closed = False

    def cached_matcher(self, output_format: Any, num_prompt_tokens: int) -> Any:
        return self.cached

    def compile(self, output_format: Any, num_prompt_tokens: int) -> Any:
        self.threads.add(threading.get_ident())
        self.compiled.append((output_format.text, num_prompt_tokens))
        self.may_compile.wait(10)
        if self.error is not None:
            raise self.error
        return Mock()

    def close(self) -> None:
        self.is_closed = True


class Setup:
    """A reader of a worker with 100 tokens in its vocabulary."""

    def __init__(self) -> None:
        self.grammars = Grammars()
        self.scopes: list[tuple[str, str]] = []
        grammars: Any = self.grammars
        identity = Mock(vocab_size=100, root_hash=self._root_hash, layout=Mock(block_size=BLOCK_SIZE))
        self.reader = SequenceReader(identity, WorkerState("decode"), grammars)

    def _root_hash(self, scope: Any) -> bytes:
        self.scopes.append((scope.tenant, scope.salt))
        return b"root"


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.grammars.may_compile.set()
    made.reader.close()
    assert made.grammars.is_closed


def message(text: str | None = None, **changes: Any) -> worker_pb2.Sequence:
    fields: dict[str, Any] = {
        "sequence_id": "r",
        "attempt": 2,
        "token_ids": [5, 6, 7],
        "num_output_tokens": 1,
        "cache_scope": worker_pb2.CacheScope(tenant="t", salt="s"),
        "stopping": pb.StoppingParams(max_tokens=4),
        "format": None if text is None else pb.ResponseFormat(regex=text),
    }
    return worker_pb2.Sequence(**(fields | changes))


async def test_a_sequence_is_that_of_its_attempt_in_its_scope(setup: Setup) -> None:
    sequence = await setup.reader.read(message(), stops_after_prefill=False)
    assert (sequence.attempt_id, sequence.token_ids, sequence.num_prompt_tokens) == ("r#2", [5, 6, 7], 2)
    assert (sequence.root_hash, setup.scopes) == (b"root", [("t", "s")])
    assert sequence.logits_rules is None
    assert setup.grammars.compiled == []


@pytest.mark.parametrize("is_cached", [False, True])
async def test_a_format_is_compiled_once_in_a_thread_of_its_own(setup: Setup, is_cached: bool) -> None:
    setup.grammars.cached = Mock() if is_cached else None
    for _ in range(2):
        sequence = await setup.reader.read(message("a+"), stops_after_prefill=False)
        assert sequence.logits_rules is not None
        assert sequence.logits_rules.grammar is not None
    assert setup.grammars.compiled == ([] if is_cached else [("a+", 2)] * 2)
    assert len(setup.grammars.threads) == (not is_cached)
    assert threading.get_ident() not in setup.grammars.threads


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (BadFormatError("is not valid"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (StructuredOutputUnavailableError("x"), grpc.StatusCode.FAILED_PRECONDITION, "NO_STRUCTURED_OUTPUT"),
        (MissingTokenizerError("x"), grpc.StatusCode.FAILED_PRECONDITION, "NO_STRUCTURED_OUTPUT"),
    ],
)
async def test_a_format_that_cannot_be_compiled_has_its_status(
    setup: Setup, error: Exception, code: grpc.StatusCode, reason: str
) -> None:
    setup.grammars.error = error
    with pytest.raises(ServiceError) as caught:
        await setup.reader.read(message("a+"), stops_after_prefill=False)
    assert (caught.value.code, caught.value.reason) == (code, reason)
    if isinstance(caught.value, InvalidArgument):
        assert caught.value.field == "format.regex"


async def test_a_format_that_takes_too_long_can_be_tried_again(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_reader, "FORMAT_SECONDS", 0.01)
    setup.grammars.may_compile.clear()
    with pytest.raises(ServiceError, match=r"format\.regex: not compiled within 0\.01 s") as caught:
        await setup.reader.read(message("a+"), stops_after_prefill=False)
    assert caught.value.reason == "FORMATS_BUSY"
    assert caught.value.retry_after_seconds == 0.01


async def test_a_field_out_of_range_is_refused_by_name(setup: Setup) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await setup.reader.read(message(token_ids=[5, 100], num_output_tokens=0), stops_after_prefill=True)
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    ("stops_after_prefill", "num_output_tokens", "is_checked"),
    [(False, 0, True), (True, 0, False), (False, 1, False)],
)
async def test_a_dead_end_is_looked_for_where_an_answer_begins(
    setup: Setup,
    stops_after_prefill: bool,
    num_output_tokens: int,
    is_checked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(sequence_reader, "dead_end", lambda *arguments: looked.append(arguments))
    setup.reader._identity.eos_token_ids = frozenset({1})  # type: ignore[misc]
    sent = message("a+", num_output_tokens=num_output_tokens)
    sent.stopping.stop_token_ids.append(9)
    await setup.reader.read(sent, stops_after_prefill=stops_after_prefill)
    assert [arguments[1:] for arguments in looked] == ([([5, 6, 7], 100, {1, 9})] if is_checked else [])


@pytest.mark.parametrize("num_tokens", [3, 4, 9, INLINE_HASH_TOKENS + BLOCK_SIZE])
async def test_a_sequence_has_the_hashes_of_its_full_blocks(setup: Setup, num_tokens: int) -> None:
    token_ids = [2 + at % 90 for at in range(num_tokens)]
    sequence = await setup.reader.read(message(token_ids=token_ids), stops_after_prefill=True)
    parent, expected = sequence.root_hash, []
    for begin in range(0, num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = block_hash(parent, token_ids[begin : begin + BLOCK_SIZE])
        expected.append(parent)
    assert sequence.block_hashes == expected
