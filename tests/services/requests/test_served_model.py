"""The served model as a worker describes it, and what an operator may name otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.protos import kvtransfer_pb2, worker_pb2
from quire.rpc.errors import BadFileError
from quire.services.requests.served_model import load_served_model


def info(path: Path) -> worker_pb2.GetWorkerInfoResponse:
    return worker_pb2.GetWorkerInfoResponse(
        model="tiny",
        model_path=str(path),
        max_model_len=64,
        vocab_size=320,
        eos_token_ids=[1, 5],
        layout=kvtransfer_pb2.KvLayout(block_size=4),
        cache_descriptor=b"descriptor",
    )


def test_the_limits_are_the_workers_and_the_files_are_the_models(model_folder: Path) -> None:
    model = load_served_model(info(model_folder))
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 64, 320)
    assert (model.block_size, model.cache_descriptor) == (4, b"descriptor")
    assert model.eos_token_ids == {1, 5}
    assert model.chat_template is not None
    assert model.tokenizer_config["bos_token"] == "<s>"
    assert model.tokenizer.decode(model.tokenizer.encode_batch(["end"], add_special_tokens=False)[0]) == "end"


def test_an_operator_can_name_the_model_and_its_files(model_folder: Path, tmp_path: Path) -> None:
    model = load_served_model(info(tmp_path / "elsewhere"), source=str(model_folder), name="mine")
    assert model.name == "mine"
    with pytest.raises(BadFileError, match=r"has no tokenizer.json: save one"):
        load_served_model(info(tmp_path))
