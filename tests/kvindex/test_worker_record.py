"""Worker records: there and back, and what cannot be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.kvindex.worker_record import WorkerRecord, read_records

RECORD = WorkerRecord("p", "prefill", "127.0.0.1:1", "epoch", "fingerprint", True)
VALUES = json.loads(RECORD.to_json())


def test_a_record_is_read_back_unchanged() -> None:
    assert WorkerRecord.from_json(RECORD.to_json()) == RECORD


def test_fields_of_a_newer_version_are_passed_over() -> None:
    assert WorkerRecord.from_json(json.dumps({**VALUES, "color": "red"}).encode()) == RECORD


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b"[" * 100_000,
        json.dumps({**VALUES, "address": "\ud800:2"}).encode(),
        *(json.dumps({**VALUES, **change}).encode() for change in ({"role": "both"}, {"fingerprint": 64})),
        *(json.dumps({**VALUES, **change}).encode() for change in ({"address": 1}, {"is_draining": 0})),
    ],
)
def test_malformed_records_hide_no_other_worker(stored: bytes, caplog: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the parser's own messages come through
        WorkerRecord.from_json(stored)
    assert read_records([stored, RECORD.to_json()]) == [RECORD]
    assert "worker_record_malformed" in caplog.text
