"""The engine's errors as statuses: who is at fault, and which field of the request it is."""

from __future__ import annotations

import grpc
import pytest

from quire.engine.engine_thread import EngineFailedError, EngineStoppedError
from quire.engine.errors import KvBudgetError, NoTokenLeftError, RequestFailedError, RequestTooLongError
from quire.engine.sequences.sequence import Sequence
from quire.engine.structured_output.grammar import FormatFailedError
from quire.kvtransfer.errors import PushFailedError
from quire.rpc.errors import ENGINE_FAILED, NO_TOKEN_LEFT, REQUEST_FAILED, InvalidArgument, ServiceError
from quire.sampling.params import BeamParams, SamplingParams
from quire.services.worker.requests.engine_errors import known_errors

Code = grpc.StatusCode


def sequence(params: SamplingParams | None = None) -> Sequence:
    return Sequence("r#0", [5, 6], 2, params or SamplingParams(), b"")


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (RequestTooLongError("too long"), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (KvBudgetError("too small"), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (NoTokenLeftError("bad_words", 3), Code.INVALID_ARGUMENT, NO_TOKEN_LEFT),
        (FormatFailedError("format", "cannot go on"), Code.INVALID_ARGUMENT, "FORMAT_FAILED"),
        (RequestFailedError("not a number"), Code.INTERNAL, REQUEST_FAILED),
        (EngineFailedError("CUDA error"), Code.UNAVAILABLE, ENGINE_FAILED),
        (EngineStoppedError("stopped"), Code.UNAVAILABLE, "ENGINE_STOPPED"),
        (PushFailedError(Code.NOT_FOUND, "no such ticket"), Code.ABORTED, "KV_TRANSFER_FAILED"),
    ],
)
def test_each_error_has_its_status(error: Exception, code: grpc.StatusCode, reason: str) -> None:
    with pytest.raises(ServiceError) as caught, known_errors(sequence()):
        raise error
    assert (caught.value.code, caught.value.reason) == (code, reason)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(), "token_ids"),
        (SamplingParams(n=2), "sampling.n"),
        (SamplingParams(beam=BeamParams(2)), "sampling.beam.width"),
    ],
)
def test_a_request_is_too_large_by_its_prompt_or_by_its_sequences(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught, known_errors(sequence(params)):
        raise RequestTooLongError("too long")
    assert caught.value.field == field


def test_a_defect_passes_unchanged() -> None:
    with pytest.raises(KeyError), known_errors(sequence()):
        raise KeyError("a defect")
